"""The trained student as a folder that transformers loads, with a model card that says where it came from."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from alambique.core.files import atomic_folder, write_bytes, write_manifest
from alambique.core.sources import parse
from alambique.train.config import DistillConfig
from alambique.train.state import DistillResult

# The weights are shipped as training computed with them: under bf16 autocast every product already saw the weights
# rounded to bf16, so the folder is half the size at no loss, and what is measured later is what is shipped.
_SHIPPED = {"bf16": torch.bfloat16, "fp32": torch.float32}


def export_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    precision: str,
    card: str,
    facts: Mapping[str, Any],
) -> None:
    """Write weights, config, tokenizer, README.md and ``manifest.json`` (``facts`` and file hashes), all or nothing.

    ``model`` is converted in place to the dtype of ``precision``. The same model gives the same bytes.
    """
    model.eval().to(_SHIPPED[precision])
    with atomic_folder(out) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        write_bytes(scratch / "README.md", card.encode())
        write_manifest(scratch, facts)


def model_card(
    name: str,
    result: DistillResult,
    config: DistillConfig,
    lineage: Mapping[str, str],
    hub: Mapping[str, Sequence[str]],
) -> str:
    """A model card in Markdown with the header that the Hub reads, where ``hub`` gives ``base_model`` and ``datasets``.

    It holds nothing that changes from run to run, such as dates and speeds.
    """
    header = "".join(f"{key}: {json.dumps(list(names))}\n" for key, names in hub.items())
    first, last = result.curve[0], result.curve[-1]
    loss = config.loss.model_dump(exclude_defaults=True)
    told = ", ".join(f"{key} = {value}" for key, value in loss.items()) or "all defaults"
    seen = "as it ran beside the student" if config.method == "online" else "which were computed once and cached"
    matched = _matched(config, result)
    table = "\n".join(f"| {key} | {value} |" for key, value in lineage.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
{header}tags: [knowledge-distillation]
---
# {name}

A language model distilled with Alambique: trained to give the next-token probabilities of its teacher,
{seen}. Its licence and its limits are those of the models and texts below.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(PATH)
tokenizer = AutoTokenizer.from_pretrained(PATH)
```

## Lineage

| what | which |
|---|---|
{table}

## Training

- Method: `{config.method}`.
- Objective: {config.loss.divergence} with tail `{config.loss.tail}` ({told}).
{matched}- Budget: {result.steps} steps of {config.rows_per_step} rows; {result.num_tokens:,} tokens, of which
  {result.num_target_tokens:,} are targets.
- Optimiser: AdamW, peak learning rate {config.learning_rate:g}, {config.precision} over fp32 weights, seed
  {config.seed}.
- Loss: {first.loss_nats:.4f} nats at the first step, {last.loss_nats:.4f} at the last (divergence
  {last.kd_nats:.4f}, cross-entropy {last.ce_nats:.4f}).
{_validations(result)}"""


def _matched(config: DistillConfig, result: DistillResult) -> str:
    """The line on hidden states, or nothing."""
    if config.hidden is None:
        return ""
    pairs = len(config.hidden.map)
    first, last = (result.curve[at].hidden_loss for at in (0, -1))
    return (
        f"- Hidden states: {pairs} pairs of layers, {config.hidden.distance}, weight {config.hidden.weight:g}; mean "
        f"distance\n  {first:.4f} at the first step, {last:.4f} at the last.\n"
    )


def _validations(result: DistillResult) -> str:
    """The table of validations, or nothing."""
    if not result.validations:
        return ""
    rows = "\n".join(
        f"| {found.step} | {found.kl_nats:.4f} | {found.agreement:.4f} | {found.perplexity:.2f} "
        f"| {found.calibration_error:.4f} |"
        for found in result.validations
    )
    return f"""
## On held-out rows, while it trained

These are the weights after step {result.shipped_step}. KL is from the teacher, over the whole vocabulary.

| step | KL, nats | top-1 agreement | perplexity | calibration error |
|---:|---:|---:|---:|---:|
{rows}
"""


def hub_repositories(manifest: Mapping[str, Any], prefix: str) -> list[str]:
    """What of a manifest's sources comes from the Hub, below ``prefix``."""
    places = [
        source.place for source in (parse(found["uri"]) for found in manifest["sources"]) if source.scheme == "hf"
    ]
    return [place.removeprefix(prefix) for place in places if place.startswith(prefix)]


def sources_text(manifest: Mapping[str, Any]) -> str:
    """Sources by URI, with the hash where the URI doesn't pin it already."""
    return ", ".join(
        f"`{uri}`" if digest in uri else f"`{uri}` (sha256 {digest})"
        for uri, digest in ((source["uri"], source["sha256"]) for source in manifest["sources"])
    )
