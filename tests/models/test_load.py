from pathlib import Path

import pytest
import torch
from transformers import (
    CohereConfig,
    Gemma2Config,
    GptOssConfig,
    GraniteConfig,
    HyperCLOVAXConfig,
    LlamaConfig,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from alambique.core.errors import UserError
from alambique.models.load import (
    SplitModel,
    load_model,
    load_tokenizer,
    positions,
    stored_dtype,
    tokenizer_sha256,
    vocab_size,
)
from tests.tiny_models import PLAIN_TEMPLATE, save_model, tiny_model, tiny_tokenizer

GPT_OSS = {
    "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
FAMILIES = {
    "llama": (LlamaConfig, "sdpa", {}),
    "llama-eager": (LlamaConfig, "eager", {"tie_word_embeddings": True}),
    "qwen2-tied": (Qwen2Config, "sdpa", {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, "sdpa", {"head_dim": 8}),
    "gpt-oss": (GptOssConfig, "eager", GPT_OSS),
    "gemma2": (Gemma2Config, "eager", {"head_dim": 8, "sliding_window": 4}),
    "cohere": (CohereConfig, "sdpa", {"logit_scale": 0.25}),
    "granite": (GraniteConfig, "sdpa", {"logits_scaling": 4.0}),
    "hyperclovax": (HyperCLOVAXConfig, "sdpa", {"logits_scaling": 0.5}),
}
DOCUMENTS = [[0] * 5 + [1] + [2] * 6, [0] * 7 + [1] * 3 + [-1] * 2]


@pytest.fixture(params=FAMILIES)
def split(request: pytest.FixtureRequest) -> SplitModel:
    config_class, attention, settings = FAMILIES[request.param]
    return SplitModel(tiny_model(config_class, attention=attention, **settings))


def test_packed_rows_equal_documents_run_apart(split: SplitModel) -> None:
    documents_BS = torch.tensor(DOCUMENTS, dtype=torch.int32)
    ids_BS = torch.randint(3, 300, documents_BS.shape, dtype=torch.int32)
    packed_BSV = split.logits(split.hidden(ids_BS, documents_BS))
    for row in range(2):
        for document in documents_BS[row].unique():
            where = documents_BS[row] == document
            alone_SV = split.model(input_ids=ids_BS[row, where][None].long(), use_cache=False).logits[0]
            assert alone_SV.abs().max() > 0.1
            torch.testing.assert_close(packed_BSV[row, where], alone_SV, rtol=1e-4, atol=1e-5)
    assert packed_BSV.isfinite().all()


def test_check_accepts_every_family(split: SplitModel) -> None:
    split.check()


def test_gradients_reach_every_weight_and_the_tied_one_twice() -> None:
    split = SplitModel(tiny_model(LlamaConfig, tie_word_embeddings=True))
    documents_BS = torch.tensor(DOCUMENTS)
    ids_BS = torch.randint(3, 300, documents_BS.shape)
    hidden_BSD = split.hidden(ids_BS, documents_BS)
    torch.nn.functional.linear(hidden_BSD, split.head_weight_VD).logsumexp(-1).sum().backward()
    for name, parameter in split.model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
        assert parameter.grad.isfinite().all(), name
    unused = torch.ones(320, dtype=torch.bool)
    unused[ids_BS.unique()] = False
    assert split.head_weight_VD.grad is not None
    assert split.head_weight_VD.grad[unused].abs().sum() > 0  # from the head; the embedding alone would leave zeros


def test_gradient_checkpointing_gives_the_same_gradient() -> None:
    gradients = []
    for checkpointing in (False, True):
        split = SplitModel(tiny_model(LlamaConfig).train())
        if checkpointing:
            split.model.activation_checkpointing_enable()
        documents_BS = torch.tensor(DOCUMENTS)
        split.hidden(documents_BS.abs() + 5, documents_BS).square().sum().backward()
        gradients.append(split.model.get_input_embeddings().weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


@pytest.mark.parametrize("family", ["llama", "llama-eager", "gemma2"])
def test_layers_that_lie_elsewhere_give_the_same_bits(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate's hooks bring weights in from the disk here, as on a GPU from the CPU; only the place differs."""
    config_class, attention, settings = FAMILIES[family]
    model = tiny_model(config_class, attention=attention, **settings)
    save_model(tmp_path, model, tiny_tokenizer())
    tied = model.config.tie_word_embeddings

    def places(model: PreTrainedModel, **_: object) -> dict[str, str]:
        on_disk = ("model.layers.1", "model.layers.2", *([] if tied else ["lm_head"]))
        rest = [f"model.{name}" for name, _ in model.model.named_children() if name != "layers"]
        return dict.fromkeys((*rest, "model.layers.0", "lm_head"), "cpu") | dict.fromkeys(on_disk, "disk")

    monkeypatch.setattr("transformers.integrations.accelerate.infer_auto_device_map", places)
    cpu = torch.device("cpu")
    options = {"dtype": "float32", "device": cpu, "attention": attention}
    split, spread = (SplitModel(load_model(tmp_path, **options, **more)) for more in ({}, {"device_map": "auto"}))
    assert spread.model.model.layers[1].mlp.up_proj.weight.is_meta
    assert spread.model.lm_head.weight.is_meta != tied
    spread.gather_head()
    spread.check(cpu)
    documents_BS = torch.tensor(DOCUMENTS, dtype=torch.int32)
    ids_BS = torch.randint(3, 300, documents_BS.shape, dtype=torch.int32)
    with torch.inference_mode():
        expected, found = (each.logits(each.hidden(ids_BS, documents_BS)) for each in (split, spread))
    assert torch.equal(found, expected)
    assert spread.model.lm_head.weight.is_meta != tied  # the whole copy is ours alone


def test_what_cannot_be_split_between_processes(tmp_path: Path) -> None:
    def refusal(config_class: type, processes: int, **settings: object) -> str:
        config_class(num_attention_heads=4, num_key_value_heads=2, **settings).save_pretrained(tmp_path)
        with pytest.raises(UserError) as refused:
            load_model(tmp_path, dtype="float32", device=torch.device("cpu"), tensor_parallel=processes)
        return str(refused.value)

    assert refusal(LlamaConfig, 4) == (
        f"{tmp_path} has 4 and 2 attention heads, which tensor_parallel = 4 processes can't share out evenly: choose a "
        "divisor, or use device_map = auto."
    )
    assert refusal(GptOssConfig, 2) == (
        "transformers has no plan to split the layers of a gpt_oss model, so tensor_parallel = 2 would not make it "
        "smaller: use device_map = auto instead."
    )


def test_scale_and_softcap_are_read_with_their_meaning() -> None:
    def of(family: str) -> SplitModel:
        config_class, attention, settings = FAMILIES[family]
        return SplitModel(tiny_model(config_class, attention=attention, **settings))

    assert (of("llama").logit_scale, of("llama").logit_softcap) == (1.0, None)
    assert of("cohere").logit_scale == 0.25
    assert of("granite").logit_scale == 0.25  # divides
    assert of("hyperclovax").logit_scale == 0.5  # multiplies, under the same name
    assert of("gemma2").logit_softcap == 30.0


def test_check_refuses_attention_that_leaks_between_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without masks from us, gpt-oss in transformers 5.24 sees one long document."""
    config_class, attention, settings = FAMILIES["gpt-oss"]
    split = SplitModel(tiny_model(config_class, attention=attention, **settings))
    monkeypatch.setattr("alambique.models.load.create_masks_for_generate", lambda **_: None)
    with pytest.raises(
        UserError, match=r"GptOssForCausalLM with eager attention gives logits that differ by \d+% when"
    ):
        split.check()


def test_recurrent_models_are_refused() -> None:
    config = MambaConfig(vocab_size=320, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(UserError, match="MambaForCausalLM has linear_attention layers, whose state would run on"):
        SplitModel(MambaForCausalLM(config))


def test_check_refuses_a_wrong_logit_scale() -> None:
    split = SplitModel(tiny_model(LlamaConfig))
    split.logit_scale = 1.1
    with pytest.raises(UserError, match="the head is applied apart: choose another `attention`"):
        split.check()


def test_positions_restart_in_each_document() -> None:
    positions_BS = positions(torch.tensor([[0, 0, 1, 2, 2, 2, -1, -1], [4, 4, 4, 4, 4, 4, 4, 4]]))
    assert positions_BS.tolist() == [[0, 1, 0, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7]]


def test_a_head_that_is_no_linear_layer_is_refused() -> None:
    model = tiny_model(LlamaConfig)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(UserError, match="has a Sequential as its output head"):
        SplitModel(model)


def test_saved_models_load_in_eval_mode_and_the_asked_dtype(tmp_path: Path) -> None:
    model = tiny_model(LlamaConfig)
    save_model(tmp_path, model, tiny_tokenizer())
    loaded = load_model(tmp_path, dtype="bfloat16", device=torch.device("cpu"))
    assert not loaded.training
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.bfloat16())
    assert stored_dtype(tmp_path) == "float32"
    loaded.save_pretrained(tmp_path / "half")
    assert stored_dtype(tmp_path / "half") == "bfloat16"


def test_missing_weights_are_refused_not_invented(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_model(tmp_path, tiny_model(LlamaConfig), tiny_tokenizer())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 weights of its model \(model.layers.1.mlp.up_proj.weight"):
        load_model(tmp_path, dtype="float32", device=torch.device("cpu"))


def test_bad_folders_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config.json does not exist. Name a folder that holds a transformers model"):
        load_model(tmp_path, dtype="float32", device=torch.device("cpu"))
    with pytest.raises(UserError, match="has no tokenizer that can be loaded"):
        load_tokenizer(tmp_path)
    save_model(tmp_path, tiny_model(Gemma2Config, attention="eager", head_dim=8), tiny_tokenizer())
    with pytest.raises(UserError, match="can't be loaded as a causal language model: Gemma2ForCausalLM does not supp"):
        load_model(tmp_path, dtype="float32", device=torch.device("cpu"), attention="sdpa")


def test_tokenizer_hash_is_of_content(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(template=PLAIN_TEMPLATE)
    digest = tokenizer_sha256(tokenizer)
    tokenizer.save_pretrained(tmp_path / "a")
    reloaded = load_tokenizer(tmp_path / "a")
    assert tokenizer_sha256(reloaded) == digest
    reloaded(["a b c", "d"], padding=True, truncation=True, max_length=2)  # settings of one call don't count
    assert tokenizer_sha256(reloaded) == digest
    assert tokenizer_sha256(tiny_tokenizer(template=PLAIN_TEMPLATE + " ")) != digest
    assert tokenizer_sha256(tiny_tokenizer(template=PLAIN_TEMPLATE, vocab_size=299)) != digest
    assert tokenizer_sha256(tiny_tokenizer(template=PLAIN_TEMPLATE, bos=True)) != digest
    assert tokenizer_sha256(tiny_tokenizer(template=PLAIN_TEMPLATE, eos="<pad>")) != digest


def test_vocab_size_is_the_largest_id_plus_one() -> None:
    assert vocab_size(tiny_tokenizer()) == len(tiny_tokenizer()) == 300
