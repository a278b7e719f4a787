"""Models that people train: classes of transformers with small random configurations, against the oracle.

Dropout and the like are off, so that both sides compute the same; nothing is downloaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.oracle import BF16, F32, Trial, step_of
from kit.ranks import Rank, on_ranks
from torch import nn

import ddp_mp

pytest.importorskip("transformers")

Batch = dict[str, torch.Tensor]
Made = tuple[nn.Module, Callable[[], Batch]]
WORDS, LENGTH = 40, 12
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}


def words(count: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, WORDS, (count, length))


def causal() -> Batch:
    tokens = words()
    return {"input_ids": tokens, "labels": tokens}


def gpt2(hf: Any) -> Made:
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": LENGTH}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=WORDS, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, **sizes, **special))
    assert model.lm_head.weight is model.transformer.wte.weight
    return model, causal


def bert(hf: Any) -> Made:
    config = hf.BertConfig(
        vocab_size=WORDS,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        **SMALL,
    )

    def batch() -> Batch:
        mask = torch.ones(2, LENGTH, dtype=torch.long)
        mask[1, 8:] = 0
        return {"input_ids": words(), "attention_mask": mask, "labels": words()}

    return hf.BertForMaskedLM(config), batch


def llama(hf: Any) -> Made:
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=WORDS, num_key_value_heads=1, **SMALL)), causal


def llama_with_checkpoints(hf: Any) -> Made:
    model, batch = llama(hf)
    model.gradient_checkpointing_enable()
    return model, batch


def mixtral(hf: Any) -> Made:
    config = hf.MixtralConfig(
        vocab_size=WORDS, num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2, output_router_logits=True, **SMALL
    )
    return hf.MixtralForCausalLM(config), causal


def t5(hf: Any) -> Made:
    config = hf.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, dropout_rate=0, decoder_start_token_id=0
    )
    return hf.T5ForConditionalGeneration(config), lambda: {"input_ids": words(), "labels": words()}


def vit(hf: Any) -> Made:
    config = hf.ViTConfig(
        image_size=16, patch_size=8, hidden_dropout_prob=0, attention_probs_dropout_prob=0, num_labels=3, **SMALL
    )

    def batch() -> Batch:
        return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.randint(0, 3, (2,))}

    return hf.ViTForImageClassification(config), batch


def whisper(hf: Any) -> Made:
    parts = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = hf.WhisperConfig(
        vocab_size=WORDS,
        d_model=32,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=8,
        max_target_positions=LENGTH,
        dropout=0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        **parts,
    )

    def batch() -> Batch:
        return {"input_features": torch.randn(2, 8, 16), "labels": words()}

    return hf.WhisperForConditionalGeneration(config), batch


def resnet(hf: Any) -> Made:
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3)

    def batch() -> Batch:
        return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 3, (4,))}

    return hf.ResNetForImageClassification(config), batch


# An expert that no token of a batch went to has no gradient.
UNUSED = ("mixtral",)
MODELS = {make.__name__: make for make in (gpt2, bert, llama, llama_with_checkpoints, mixtral, t5, vit, whisper, resnet)}


@pytest.mark.long
@on_ranks(2)
@pytest.mark.parametrize("name", MODELS)
def test_transformers_model_equals_oracle(rank: Rank, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other packages, as they are imported
        import transformers

        model, batch = MODELS[name](transformers)
    # On a CPU, batch normalisation has no kernel for bfloat16 weights beside full-precision statistics.
    buffers = BF16 if name == "resnet" else None
    trial = Trial(rank, model, ddp_mp.MixedPrecision(BF16, F32, buffers), find_unused_parameters=name in UNUSED)
    losses = []

    def loss(call: Any, inputs: Batch) -> torch.Tensor:
        value = call(**inputs).loss.float()
        losses.append(value.item())
        return value

    trial.train(batch, steps=2, step=step_of(loss), accumulate=2)
    assert all(0 < value < 100 for value in losses)
    assert all(param.dtype is F32 for param in model.parameters())
    trial.zero_grad()
    with torch.no_grad():
        assert trial.ddp(**batch()).logits.dtype is BF16  # and evaluates
