"""Scores against their definitions, each document by itself, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, LlamaConfig, Qwen3Config

from alambique.core.errors import UserError
from alambique.models.importance import measure_importance
from alambique.models.load import SplitModel
from tests.tiny_models import tiny_model

# Rows of 12 positions: three documents, one, and one with padding.
DOCUMENTS_RS = torch.tensor([[0] * 3 + [1] * 5 + [2] * 4, [0] * 12, [0] * 7 + [-1] * 5], dtype=torch.int32)
IDS_RS = torch.randint(3, 300, (3, 12), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
PARTS = [(0, slice(0, 3)), (0, slice(3, 8)), (0, slice(8, 12)), (1, slice(0, 12)), (2, slice(0, 7))]


def model_of(config_class: Any = LlamaConfig, **settings: Any) -> Any:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 5, "head_dim": 4}
    return tiny_model(config_class, **(sizes | settings))


def documents_alone(model: Any) -> None:
    for row, part in PARTS:
        model(input_ids=IDS_RS[row : row + 1, part].long(), use_cache=False)


def residual_states(model: Any) -> list[Tensor]:
    """The residual stream before each layer and after the last, [N, D] each, from documents run alone."""
    norm, model.model.norm = model.model.norm, nn.Identity()  # transformers gives the last state after the norm
    found = [
        model(input_ids=IDS_RS[row : row + 1, part].long(), output_hidden_states=True, use_cache=False).hidden_states
        for row, part in PARTS
    ]
    model.model.norm = norm
    return [torch.cat([states[layer][0] for states in found]).double() for layer in range(len(found[0]))]


def turned(before_ND: Tensor, after_ND: Tensor) -> float:
    cosine_N = (before_ND * after_ND).sum(1) / before_ND.norm(dim=1) / after_ND.norm(dim=1)
    return float(1 - cosine_N.mean())


@torch.no_grad()
@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen3Config])
def test_influence_and_distance_are_their_definitions(config_class: Any) -> None:
    model = model_of(config_class)
    states = residual_states(model)
    found = measure_importance(SplitModel(model), IDS_RS, DOCUMENTS_RS, block=3)
    assert found.num_tokens == 31
    assert found.block_influence == pytest.approx([turned(states[i], states[i + 1]) for i in range(5)], rel=1e-4)
    assert found.block_distance == pytest.approx([turned(states[i], states[i + 3]) for i in range(3)], rel=1e-4)
    assert found.channels_LI is None
    assert found.groups_LG is None


@torch.no_grad()
def test_channels_and_groups_are_their_definitions() -> None:
    model = model_of()
    found = measure_importance(SplitModel(model), IDS_RS, DOCUMENTS_RS, width=True)
    assert found.channels_LI is not None
    assert found.groups_LG is not None
    for index, layer in enumerate(model.model.layers):
        seen: dict[str, list[Tensor]] = {"mlp": [], "attention": []}

        def keep(module: Any, args: Any, output: Any, seen: Any = seen) -> None:
            seen["mlp"].append(args[0][0])

        handle = layer.mlp.register_forward_hook(keep)
        documents_alone(model)
        handle.remove()
        mlp, inputs_ND = layer.mlp, torch.cat(seen["mlp"])
        channels_NI = mlp.act_fn(mlp.gate_proj(inputs_ND)) * mlp.up_proj(inputs_ND)
        torch.testing.assert_close(found.channels_LI[index], channels_NI.abs().double().mean(0), rtol=1e-4, atol=0)
        assert found.groups_LG[index].tolist() == pytest.approx(group_norms(model, layer), rel=1e-4)
    assert measure_importance(SplitModel(model), IDS_RS, DOCUMENTS_RS).block_distance == found.block_influence


def group_norms(model: Any, layer: Any) -> list[float]:
    """What attention puts out when all groups but one are silent: its heads' columns of the output projection."""
    weight, norms = layer.self_attn.o_proj.weight, []
    whole = weight.clone()
    for group in range(4):
        weight.zero_()
        columns = slice(group * 8, group * 8 + 8)  # two heads of four
        weight[:, columns] = whole[:, columns]
        outputs: list[Tensor] = []
        handle = layer.self_attn.register_forward_hook(lambda m, a, output, o=outputs: o.append(output[0][0]))
        documents_alone(model)
        handle.remove()
        norms.append(float(torch.cat(outputs).double().norm(dim=1).mean()))
    weight.copy_(whole)
    return norms


@torch.no_grad()
def test_a_layer_that_does_nothing_scores_nothing_and_hooks_are_gone() -> None:
    model = model_of()
    idle = model.model.layers[2]
    idle.self_attn.o_proj.weight.zero_()
    idle.mlp.down_proj.weight.zero_()
    found = measure_importance(SplitModel(model), IDS_RS, DOCUMENTS_RS, width=True)
    assert found.block_influence[2] == pytest.approx(0, abs=1e-6)
    assert min(score for i, score in enumerate(found.block_influence) if i != 2) > 1e-3
    assert found.groups_LG is not None
    assert not found.groups_LG[2].any()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_padding_does_not_count() -> None:
    model = SplitModel(model_of())
    other = IDS_RS.clone()
    other[2, 7:] = 299
    scores = [measure_importance(model, ids_RS, DOCUMENTS_RS, width=True) for ids_RS in (IDS_RS, other)]
    assert scores[0].block_influence == scores[1].block_influence
    assert scores[0].channels_LI is not None
    assert scores[1].channels_LI is not None
    assert torch.equal(scores[0].channels_LI, scores[1].channels_LI)


def test_a_mixture_of_experts_has_influence() -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}
    model = model_of(GptOssConfig, attention="eager", **experts)
    found = measure_importance(SplitModel(model), IDS_RS, DOCUMENTS_RS, block=2)
    assert len(found.block_influence) == 5
    assert len(found.block_distance) == 4


def test_what_cannot_be_measured_is_refused() -> None:
    model = SplitModel(model_of())
    with pytest.raises(UserError, match=r"hold no token: raise `student\.measure\.rows`"):
        measure_importance(model, IDS_RS, torch.full_like(DOCUMENTS_RS, -1))
    model.config.num_hidden_layers = 7
    with pytest.raises(UserError, match="LlamaForCausalLM has no list of 7 layers whose hidden states could be seen"):
        measure_importance(model, IDS_RS, DOCUMENTS_RS)
