"""A GGUF file is written here by hand, in the format's own library, and converted as the embedded teacher is."""

import json
import multiprocessing
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from alambique.core.errors import UserError
from alambique.core.files import sha256_file
from alambique.core.sources import content_sha256
from alambique.models import fetch as fetch_module
from alambique.models.fetch import fetch_model, fetch_tokenizer
from tests.tiny_models import save_model, tiny_model, tiny_tokenizer

D, HEADS, FFN = 32, 4, 64


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ALAMBIQUE_ASSETS", str(tmp_path / "assets"))
    return tmp_path


def write_gguf(path: Path) -> None:
    tokenizer = tiny_tokenizer()
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merges = [" ".join(pair) for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(vocab))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([gguf.TokenType.CONTROL if i < 6 else gguf.TokenType.NORMAL for _, i in vocab])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    random = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (len(vocab), D), "output_norm.weight": (D,), "blk.0.attn_norm.weight": (D,),
        "blk.0.ffn_norm.weight": (D,), "blk.0.attn_q.weight": (D, D), "blk.0.attn_k.weight": (D // 2, D),
        "blk.0.attn_v.weight": (D // 2, D), "blk.0.attn_output.weight": (D, D), "blk.0.ffn_gate.weight": (FFN, D),
        "blk.0.ffn_up.weight": (FFN, D), "blk.0.ffn_down.weight": (D, FFN),
    }  # fmt: skip
    for name, shape in shapes.items():
        values = random.standard_normal(shape).astype(np.float32)
        if len(shape) == 2:
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _fetch(uri: str) -> str:
    return str(fetch_model(uri).path)


def test_gguf_is_converted_once_and_again_only_if_damaged(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(place / "tiny.gguf")
    pin = sha256_file(place / "tiny.gguf")
    source = fetch_model(f"file:tiny.gguf#sha256={pin}")
    assert source.sha256 == pin
    model = AutoModelForCausalLM.from_pretrained(source.path)
    assert model.dtype == torch.float32
    packed = gguf.GGUFReader(place / "tiny.gguf").tensors
    embedding = next(tensor for tensor in packed if tensor.name == "token_embd.weight")
    expected = gguf.quants.dequantize(embedding.data, embedding.tensor_type)
    assert np.array_equal(model.model.embed_tokens.weight.detach().numpy(), expected)
    assert AutoTokenizer.from_pretrained(source.path).encode("the cat") == tiny_tokenizer().encode("the cat")
    assert (source.path / "model.safetensors").stat().st_mode & 0o777 == 0o644

    conversions = []
    convert = fetch_module._convert
    monkeypatch.setattr(fetch_module, "_convert", lambda *args: conversions.append(convert(*args)))
    assert fetch_model(source.uri).path == fetch_tokenizer(source.uri) == source.path
    assert not conversions
    with (source.path / "model.safetensors").open("r+b") as stream:
        stream.seek(-4, 2)
        stream.write(b"oops")
    fetch_model(source.uri)
    assert len(conversions) == 1


def test_processes_at_once_convert_once(place: Path) -> None:
    write_gguf(place / "tiny.gguf")
    uri = f"file:tiny.gguf#sha256={sha256_file(place / 'tiny.gguf')}"
    with multiprocessing.get_context("fork").Pool(3) as pool:
        paths = set(pool.map(_fetch, [uri] * 3))
    assert len(paths) == 1
    assert [path.name for path in (place / "assets/models").iterdir()] == [Path(paths.pop()).name]


def test_a_damaged_gguf_is_refused(place: Path) -> None:
    (place / "bad.gguf").write_bytes(b"GGUF but not really")
    pin = sha256_file(place / "bad.gguf")
    with pytest.raises(UserError, match=r"bad.gguf can't be converted from GGUF \(.*\): use the model's safetensors"):
        fetch_model(f"file:bad.gguf#sha256={pin}")
    assert list((place / "assets/models").iterdir()) == []


def test_a_folder_is_identified_by_its_hash(place: Path) -> None:
    save_model(place / "model", tiny_model(LlamaConfig), tiny_tokenizer())
    pin = content_sha256(place / "model")
    source = fetch_model(f"file:model#sha256={pin}")
    assert (source.sha256, source.path) == (pin, Path("model"))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("config.json", "is not a transformers model: there is no config.json"),
        ("model.safetensors", r"has no safetensors weights \(pickled ones are never loaded\)"),
    ],
)
def test_incomplete_folders_are_refused(place: Path, broken: str, message: str) -> None:
    save_model(place / "model", tiny_model(LlamaConfig), tiny_tokenizer())
    (place / "model" / broken).unlink()
    with pytest.raises(UserError, match=message):
        fetch_model(f"file:model#sha256={content_sha256(place / 'model')}")


def test_a_missing_shard_is_named(place: Path) -> None:
    tiny_model(LlamaConfig).save_pretrained(place / "model", max_shard_size="50KB")
    next((place / "model").glob("*-of-*")).unlink()
    with pytest.raises(UserError, match=r"is incomplete: model-0.*safetensors is missing"):
        fetch_model(f"file:model#sha256={content_sha256(place / 'model')}")


def test_a_hub_model_in_gguf_is_identified_by_commit_and_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(place / "tiny.gguf")
    shutil.copy(place / "tiny.gguf", place / "other.gguf")
    commit = "1" * 40
    monkeypatch.setattr(fetch_module, "fetch", lambda uri: place / uri.rsplit("/", 1)[1])
    one = fetch_model(f"hf://org/name@{commit}/tiny.gguf")
    other = fetch_model(f"hf://org/name@{commit}/other.gguf")
    assert one.sha256 != other.sha256
    assert one.path != other.path
