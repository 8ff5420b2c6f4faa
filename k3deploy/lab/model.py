"""Tiny ``kimi-k3`` models from a seed: real architecture, random weights, a working tokenizer.

The lab needs a model that exercises what the large one does (KDA layers with a recurrent state, MLA layers with a
compressed K cache, a latent mixture of experts, attention residuals) in a few seconds on a CPU. A GGUF made here is
byte-identical for one (spec, seed, type): every tensor has its own PCG64 stream, keyed by seed and tensor name, of
which only the raw 64-bit words are used (numpy guarantees those; its normal variates may change between versions).

Names and shapes follow llama.cpp's ``src/models/kimi-k3.cpp``; shapes below are numpy's (rows, columns), the reverse of
ggml's.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# iq1_s: every matrix, quantized by llama.cpp's own tools. iq1_s_experts: the experts are drawn as IQ1_S blocks,
# the rest is q8_0; at the real model's sizes the experts of one layer would be 59 GB as f16.
ModelType = Literal["f16", "q8_0", "iq1_s", "iq1_s_experts"]
MODEL_TYPES: tuple[ModelType, ...] = get_args(ModelType)
ARCH = "kimi-k3"

# Raising this number makes every cached model stale: do so with any change of the bytes written here.
FORMAT = 1

KDA_HEAD_DIM = 128
KV_LORA_RANK = 512
ROPE_DIM = 64  # sizes the uncompressed part of K; K3's MLA never rotates it
NOPE_DIM = 128
V_HEAD_DIM = 128
CONV_KERNEL = 4
IQ1_S_BLOCK = (256, 50)  # weights, bytes: a half-precision scale, then grid indices, signs and small scales
IQ1_S_RMS = 7.208  # of the weights of random blocks whose scale is one
GATE_LOWER_BOUND = -5.0
SITU_BETA = 4.0
SITU_LINEAR_BETA = 25.0
RMS_EPS = 1e-6

# The first ids are the special tokens, then 256 bytes, then merges.
SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|fim|>", "<|sep|>", "<|unk|>")
BOS, EOS, END_OF_TURN, PAD = 1, 2, 4, 0
FIRST_BYTE = len(SPECIAL_TOKENS)
FIRST_MERGE = FIRST_BYTE + 256

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The sizes that one tiny model chooses; everything else is as in the real one.

    ``n_embd``, ``n_latent``, ``n_ff``, ``n_ff_expert``, ``q_lora_rank`` and ``n_head`` x 128 are multiples of 256, the
    block of IQ1_S; ``n_vocab`` is at least 264 (special tokens and bytes).
    """

    name: str
    n_layer: int
    n_embd: int
    n_head: int
    q_lora_rank: int
    n_ff: int
    n_ff_expert: int
    n_latent: int
    n_expert: int
    n_expert_used: int
    n_expert_shared: int
    n_dense: int
    residual_block: int
    n_vocab: int
    n_ctx: int

    def __post_init__(self) -> None:
        blocks = {
            "n_embd": self.n_embd,
            "n_latent": self.n_latent,
            "n_ff": self.n_ff,
            "n_ff_expert": self.n_ff_expert,
            "q_lora_rank": self.q_lora_rank,
            "n_head x 128": self.n_head * KDA_HEAD_DIM,
        }
        wrong = [f"{name} = {size}" for name, size in blocks.items() if size % 256]
        if wrong:
            raise ValueError(f"model spec {self.name}: not a multiple of 256: {', '.join(wrong)}")
        if self.n_vocab < FIRST_MERGE:
            raise ValueError(f"model spec {self.name}: n_vocab = {self.n_vocab} is below {FIRST_MERGE}")

    def is_mla(self, layer: int) -> bool:
        """Every fourth layer is full attention (MLA), the others are linear (KDA)."""
        return layer % 4 == 3


SPECS: dict[str, ModelSpec] = {
    # for role tests and quick checks: loads in a blink
    "tiny": ModelSpec(
        name="tiny",
        n_layer=4,
        n_embd=256,
        n_head=2,
        q_lora_rank=256,
        n_ff=256,
        n_ff_expert=256,
        n_latent=256,
        n_expert=4,
        n_expert_used=2,
        n_expert_shared=1,
        n_dense=1,
        residual_block=2,
        n_vocab=2048,
        n_ctx=16384,
    ),
    # for measurements: a 2048-token prompt takes some seconds on two cores
    "lab": ModelSpec(
        name="lab",
        n_layer=8,
        n_embd=256,
        n_head=2,
        q_lora_rank=256,
        n_ff=512,
        n_ff_expert=256,
        n_latent=256,
        n_expert=16,
        n_expert_used=2,
        n_expert_shared=1,
        n_dense=1,
        residual_block=2,
        n_vocab=2048,
        n_ctx=65536,
    ),
    # for a GPU: four layers of the real sizes, so that prefill costs what it costs there (20 GB as iq1_s_experts)
    "gpu": ModelSpec(
        name="gpu",
        n_layer=4,
        n_embd=7168,
        n_head=96,
        q_lora_rank=1536,
        n_ff=18432,
        n_ff_expert=3072,
        n_latent=3584,
        n_expert=896,
        n_expert_used=16,
        n_expert_shared=1,
        n_dense=1,
        residual_block=2,
        n_vocab=2048,
        n_ctx=65536,
    ),
}


# --- tokenizer -------------------------------------------------------------------------------------------------------


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for the bytes 0..255 in a byte-level BPE vocabulary (GPT-2's mapping)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def merges(count: int) -> list[tuple[str, str]]:
    """The first ``count`` merges, most wanted first: pairs of letters, then a space with a letter or a pair."""
    letters = "etaoinshrdlcumwfgypbvkjxqz"
    space = byte_alphabet()[0x20]
    pairs = [(a, b) for a in letters for b in letters]
    wanted = [
        *pairs,
        *((space, a) for a in letters),
        *((space, a + b) for a, b in pairs),
        *((a.upper(), b) for a in letters for b in letters),
    ]
    if count > len(wanted):
        raise ValueError(f"a vocabulary has at most {FIRST_MERGE + len(wanted)} tokens, not {FIRST_MERGE + count}")
    return wanted[:count]


def _write_tokenizer(writer: Any, n_vocab: int) -> None:
    from gguf import TokenType

    joined = merges(n_vocab - FIRST_MERGE)
    tokens = [*SPECIAL_TOKENS, *byte_alphabet(), *(a + b for a, b in joined)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [TokenType.CONTROL] * len(SPECIAL_TOKENS) + [TokenType.NORMAL] * (n_vocab - len(SPECIAL_TOKENS))
    )
    writer.add_token_merges([f"{a} {b}" for a, b in joined])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_eot_token_id(END_OF_TURN)
    writer.add_pad_token_id(PAD)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)


# --- keys ------------------------------------------------------------------------------------------------------------


def _write_keys(writer: Any, spec: ModelSpec) -> None:
    """The architecture's keys. The ones that the gguf package does not know for this architecture are written raw."""
    from gguf import ExpertGatingFuncType

    writer.add_name(f"k3-{spec.name}")
    writer.add_context_length(spec.n_ctx)
    writer.add_embedding_length(spec.n_embd)
    writer.add_block_count(spec.n_layer)
    writer.add_feed_forward_length(spec.n_ff)
    writer.add_head_count(spec.n_head)
    # zero marks a KDA layer; an MLA layer is served as one large KV head
    writer.add_head_count_kv([int(spec.is_mla(layer)) for layer in range(spec.n_layer)])
    writer.add_vocab_size(spec.n_vocab)
    writer.add_layer_norm_rms_eps(RMS_EPS)
    writer.add_rope_dimension_count(ROPE_DIM)

    writer.add_q_lora_rank(spec.q_lora_rank)
    writer.add_kv_lora_rank(KV_LORA_RANK)
    writer.add_key_length(KV_LORA_RANK + ROPE_DIM)
    writer.add_value_length(KV_LORA_RANK)
    writer.add_key_length_mla(NOPE_DIM + ROPE_DIM)
    writer.add_value_length_mla(V_HEAD_DIM)

    writer.add_ssm_conv_kernel(CONV_KERNEL)
    writer.add_uint32(f"{ARCH}.kda.head_dim", KDA_HEAD_DIM)
    writer.add_float32(f"{ARCH}.kda.gate_lower_bound", GATE_LOWER_BOUND)

    writer.add_expert_count(spec.n_expert)
    writer.add_expert_used_count(spec.n_expert_used)
    writer.add_expert_shared_count(spec.n_expert_shared)
    writer.add_expert_feed_forward_length(spec.n_ff_expert)
    writer.add_uint32(f"{ARCH}.expert_latent_length", spec.n_latent)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(1.0)
    writer.add_leading_dense_block_count(spec.n_dense)

    writer.add_uint32(f"{ARCH}.attn_res.block_size", spec.residual_block)
    writer.add_float32(f"{ARCH}.activation.situ_beta", SITU_BETA)
    writer.add_float32(f"{ARCH}.activation.situ_linear_beta", SITU_LINEAR_BETA)


# --- tensors ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: uniform in ``mean`` +- ``spread``; ``matrix`` ones take the model's type, the others stay float32."""

    name: str
    shape: tuple[int, ...]
    spread: float
    mean: float = 0.0
    matrix: bool = False

    @property
    def is_experts(self) -> bool:
        """Does it hold one matrix for each expert?"""
        return self.name.endswith("_exps.weight")


def _matrix(name: str, *shape: int, gain: float = 1.0) -> TensorSpec:
    """A weight whose output has ``gain`` times the root mean square of its input (uniform variance is spread^2 / 3)."""
    return TensorSpec(f"{name}.weight", shape, gain * (3.0 / shape[-1]) ** 0.5, matrix=True)


def _scale(name: str, size: int) -> TensorSpec:
    """The scale of a normalisation: around one."""
    return TensorSpec(f"{name}.weight", (size,), 0.1, mean=1.0)


def tensor_specs(spec: ModelSpec) -> Iterator[TensorSpec]:
    """Every tensor of the model in file order."""
    n_embd, n_head = spec.n_embd, spec.n_head
    yield _matrix("token_embd", spec.n_vocab, n_embd, gain=n_embd**0.5)
    yield _scale("output_norm", n_embd)
    # logits with a deviation of 4: the best token leads clearly, so greedy output does not hang on rounding
    yield _matrix("output", spec.n_vocab, n_embd, gain=4.0)
    yield TensorSpec("output_res_score.weight", (n_embd,), n_embd**-0.5)
    for layer in range(spec.n_layer):
        blk = f"blk.{layer}"
        yield _scale(f"{blk}.attn_norm", n_embd)
        yield _scale(f"{blk}.ffn_norm", n_embd)
        yield TensorSpec(f"{blk}.attn_res_score.weight", (n_embd,), n_embd**-0.5)
        yield TensorSpec(f"{blk}.ffn_res_score.weight", (n_embd,), n_embd**-0.5)
        yield from (
            _mla_specs(blk, n_embd, n_head, spec.q_lora_rank) if spec.is_mla(layer) else _kda_specs(blk, n_embd, n_head)
        )
        yield from _dense_specs(blk, n_embd, spec.n_ff) if layer < spec.n_dense else _expert_specs(blk, spec)


def _kda_specs(blk: str, n_embd: int, n_head: int) -> Iterator[TensorSpec]:
    d_inner = n_head * KDA_HEAD_DIM
    for name in "qkv":
        yield TensorSpec(f"{blk}.ssm_conv1d_{name}.weight", (1, d_inner, 1, CONV_KERNEL), (3.0 / CONV_KERNEL) ** 0.5)
        yield _matrix(f"{blk}.attn_{name}", d_inner, n_embd)
    yield _matrix(f"{blk}.ssm_f_a", KDA_HEAD_DIM, n_embd)
    yield _matrix(f"{blk}.ssm_f_b", d_inner, KDA_HEAD_DIM)
    yield _matrix(f"{blk}.ssm_beta", n_head, n_embd)
    # -exp(A_log), and a bias that makes most channels forget over some ten to some thousand tokens
    yield TensorSpec(f"{blk}.ssm_a", (n_head,), 0.5, mean=-1.0)
    yield TensorSpec(f"{blk}.ssm_dt.bias", (d_inner,), 3.0, mean=-5.0)
    yield _matrix(f"{blk}.ssm_g", d_inner, n_embd)
    yield _scale(f"{blk}.ssm_norm", KDA_HEAD_DIM)
    yield _matrix(f"{blk}.attn_output", n_embd, d_inner)


def _mla_specs(blk: str, n_embd: int, n_head: int, q_lora_rank: int) -> Iterator[TensorSpec]:
    yield _scale(f"{blk}.attn_q_a_norm", q_lora_rank)
    yield _scale(f"{blk}.attn_kv_a_norm", KV_LORA_RANK)
    yield _matrix(f"{blk}.attn_q_a", q_lora_rank, n_embd)
    # scores with a deviation of about 2: attention looks at some tokens rather than at the mean of all
    yield _matrix(f"{blk}.attn_q_b", n_head * (NOPE_DIM + ROPE_DIM), q_lora_rank, gain=2.0)
    yield _matrix(f"{blk}.attn_kv_a_mqa", KV_LORA_RANK + ROPE_DIM, n_embd)
    yield _matrix(f"{blk}.attn_k_b", n_head, KV_LORA_RANK, NOPE_DIM, gain=(NOPE_DIM / KV_LORA_RANK) ** 0.5)
    yield _matrix(f"{blk}.attn_v_b", n_head, V_HEAD_DIM, KV_LORA_RANK)
    yield _matrix(f"{blk}.attn_gate", n_head * V_HEAD_DIM, n_embd)
    yield _matrix(f"{blk}.attn_output", n_embd, n_head * V_HEAD_DIM, gain=2.0)


def _dense_specs(blk: str, n_embd: int, n_ff: int) -> Iterator[TensorSpec]:
    yield _matrix(f"{blk}.ffn_gate", n_ff, n_embd)
    yield _matrix(f"{blk}.ffn_up", n_ff, n_embd)
    yield _matrix(f"{blk}.ffn_down", n_embd, n_ff)


def _expert_specs(blk: str, spec: ModelSpec) -> Iterator[TensorSpec]:
    n_embd, n_ff, n_latent, n_expert = spec.n_embd, spec.n_ff_expert, spec.n_latent, spec.n_expert
    yield TensorSpec(f"{blk}.ffn_gate_inp.weight", (n_expert, n_embd), (3.0 / n_embd) ** 0.5)
    yield TensorSpec(f"{blk}.exp_probs_b.bias", (n_expert,), 0.01)
    yield _matrix(f"{blk}.ffn_routed_down", n_latent, n_embd)
    yield _matrix(f"{blk}.ffn_gate_exps", n_expert, n_ff, n_latent)
    yield _matrix(f"{blk}.ffn_up_exps", n_expert, n_ff, n_latent)
    yield _matrix(f"{blk}.ffn_down_exps", n_expert, n_latent, n_ff)
    yield _scale(f"{blk}.ffn_routed_norm", n_latent)
    yield _matrix(f"{blk}.ffn_routed_up", n_embd, n_latent)
    shared = n_ff * spec.n_expert_shared
    yield _matrix(f"{blk}.ffn_gate_shexp", shared, n_embd)
    yield _matrix(f"{blk}.ffn_up_shexp", shared, n_embd)
    yield _matrix(f"{blk}.ffn_down_shexp", n_embd, shared)


def _values(tensor: TensorSpec, seed: int) -> NDArray[np.float32]:
    """float32 values of one tensor: 16 random bits each, four to a raw word of the tensor's own PCG64 stream."""
    import numpy as np

    size = int(np.prod(tensor.shape))
    stream = np.random.PCG64([seed, zlib.crc32(tensor.name.encode())])
    words = stream.random_raw((size + 3) // 4).astype("<u8").view("<u2")[:size]
    unit = (words.astype(np.float32) - np.float32(32767.5)) / np.float32(32767.5)
    values = np.float32(tensor.mean) + np.float32(tensor.spread) * unit
    if tensor.name == "output.weight":
        _favour_text(values.reshape(tensor.shape))
    return values.reshape(tensor.shape)


def _favour_text(output: NDArray[np.float32]) -> None:
    """Shrink the rows of special tokens and of bytes that are no printable ASCII.

    Greedy output then neither stops after a few tokens nor holds broken UTF-8.
    """
    output[:FIRST_BYTE] *= 0.02
    for byte in (*range(0x20), *range(0x7F, 0x100)):
        output[FIRST_BYTE + byte] *= 0.02


def _iq1_s_blocks(tensor: TensorSpec, seed: int) -> NDArray[np.uint8]:
    """One tensor as IQ1_S blocks of random bits: every pattern is valid, and one scale gives them the right size."""
    import numpy as np

    weights, length = IQ1_S_BLOCK
    rows = (*tensor.shape[:-1], tensor.shape[-1] // weights * length)
    size = int(np.prod(rows))
    stream = np.random.PCG64([seed, zlib.crc32(tensor.name.encode())])
    blocks = stream.random_raw((size + 7) // 8).astype("<u8", copy=False).view(np.uint8)[:size].reshape(-1, length)
    scale = np.array([tensor.spread / 3.0**0.5 / IQ1_S_RMS], "<f2")
    blocks[:, :2] = scale.view(np.uint8)
    return blocks.reshape(rows)


def make_model(
    path: Path, spec: ModelSpec, seed: int, model_type: Literal["f16", "q8_0", "iq1_s_experts"] = "f16"
) -> None:
    """Write the GGUF of ``spec`` from ``seed`` to ``path``, byte-identical for the same arguments; atomic (rename)."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, quants

    kinds = GGMLQuantizationType
    file_type = {
        "f16": LlamaFileType.MOSTLY_F16,
        "q8_0": LlamaFileType.MOSTLY_Q8_0,
        "iq1_s_experts": LlamaFileType.MOSTLY_IQ1_S,
    }[model_type]

    def kind(tensor: TensorSpec) -> GGMLQuantizationType:
        if not tensor.matrix:
            return kinds.F32
        if model_type == "f16":
            return kinds.F16
        return kinds.IQ1_S if model_type == "iq1_s_experts" and tensor.is_experts else kinds.Q8_0

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    writer = GGUFWriter(partial, ARCH)
    try:
        _write_keys(writer, spec)
        _write_tokenizer(writer, spec.n_vocab)
        writer.add_file_type(file_type)
        writer.add_quantization_version(2)
        tensors = list(tensor_specs(spec))
        for tensor in tensors:
            size = int(np.prod(tensor.shape))
            wanted = kind(tensor)
            if wanted in (kinds.F32, kinds.F16):
                dtype = np.dtype(np.float32 if wanted == kinds.F32 else np.float16)
                writer.add_tensor_info(tensor.name, tensor.shape, dtype, size * dtype.itemsize)
            else:
                packed = quants.quant_shape_to_byte_shape(tensor.shape, wanted)
                writer.add_tensor_info(tensor.name, packed, np.dtype(np.uint8), int(np.prod(packed)), wanted)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            wanted = kind(tensor)
            if wanted == kinds.IQ1_S:
                writer.write_tensor_data(_iq1_s_blocks(tensor, seed))
                continue
            values = _values(tensor, seed)
            if wanted == kinds.F16:
                values = values.astype(np.float16)
            elif wanted == kinds.Q8_0:
                values = quants.quantize(values, wanted)
            writer.write_tensor_data(values)
        writer.close()
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
