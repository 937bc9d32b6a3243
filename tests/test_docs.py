"""What the pages of docs/ quote is still what the code says."""

import ast
import re
from pathlib import Path

from ruamel.yaml import YAML

from pipeline.check import check_params

ROOT = Path(__file__).resolve().parents[1]


def messages() -> list[str]:
    """Every string of the code; … stands for what is filled in."""
    found = []
    for path in [*ROOT.glob("src/**/*.py"), *ROOT.glob("pipeline/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def quoted(page: str) -> list[str]:
    """The code spans in the first column of a page's tables."""
    cells = re.findall(r"^\| (`.*?`) \| ", (ROOT / page).read_text(), re.M)
    return [span.strip("`") if span.startswith("``") else span[1:-1] for span in cells]


def test_every_message_that_troubleshooting_quotes_is_in_the_code() -> None:
    known = messages()
    quotes = quoted("docs/troubleshooting.md")
    assert len(quotes) > 30
    for quote in quotes:
        pattern = re.compile(".*".join(re.escape(part) for part in quote.split("…")), re.S)
        assert any(pattern.search(message) for message in known), f"no code says {quote!r}"
        assert len(re.sub(r"\W", "", quote)) > 7, f"{quote!r} would match anything"


def test_the_pair_of_the_page_is_valid_beside_the_default(tmp_path: Path) -> None:
    block = re.search(r"```yaml\n(.*?)```", (ROOT / "docs/new-pair.md").read_text(), re.S)
    assert block
    yaml = YAML(typ="safe")
    params = yaml.load((ROOT / "params.yaml").read_text())
    pairs = yaml.load(block[1])["pairs"]
    assert not pairs.keys() & params["pairs"].keys()
    params["pairs"] |= pairs
    with (tmp_path / "params.yaml").open("w") as stream:
        yaml.dump(params, stream)
    check_params(tmp_path / "params.yaml")
