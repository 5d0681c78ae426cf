"""Chat templates with the structure of well-known ones, in few words, and tokenizers that can spell them."""

import random
import string
from collections.abc import Callable

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    "gemma": ("<bos>", "<start_of_turn>", "<end_of_turn>"),
}
TAGS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A tag before each turn, and nothing else."""
END = {"chatml": "<|im_end|>", "llama": "<|eot_id|>", "gemma": "<end_of_turn>"}

TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
HEADER = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TOOLS = """{% if tools %}{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- for t in tools %}{{ '\n' + t | tojson }}{% endfor %}
{{- '\n<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}"""
ANSWERS = """{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"""

QWEN_2_5 = f"""{TOOLS}{{% for m in messages %}}{{% if m.role == 'tool' %}}{ANSWERS}
{{%- elif m.role != 'system' or not loop.first %}}{TURN}{{% endif %}}{{% endfor %}}{HEADER}"""
"""Tools in the system turn; adjacent answers of tools share one turn of the user."""

QWEN_3 = f"""{TOOLS}{{% set asked = namespace(last=-1) %}}
{{%- for m in messages %}}{{% if m.role == 'user' and not m.content.startswith('<tool_response>') %}}
{{%- set asked.last = loop.index0 %}}{{% endif %}}{{% endfor %}}
{{%- for m in messages %}}{{% if m.role == 'tool' %}}{ANSWERS}
{{%- elif m.role == 'assistant' %}}
{{%- set parts = m.content.split('</think>') %}}{{% set thought = parts[0].split('<think>')[-1].strip('\n') %}}
{{{{- '<|im_start|>assistant\n' }}}}
{{%- if parts | length > 1 and thought and loop.index0 > asked.last %}}
{{{{- '<think>\n' + thought + '\n</think>\n\n' }}}}{{% endif %}}
{{{{- (parts[-1].lstrip('\n') if parts | length > 1 else m.content) + '<|im_end|>\n' }}}}
{{%- elif m.role != 'system' or not loop.first %}}{TURN}{{% endif %}}{{% endfor %}}{HEADER}"""
"""Thoughts are written anew, and only those after the user's last message."""

SMOLLM2 = f"""{{% for m in messages %}}{{% if loop.first and m.role != 'system' %}}
{{{{- '<|im_start|>system\nYou are small<|im_end|>\n' }}}}{{% endif %}}{TURN}{{% endfor %}}{HEADER}"""
"""A system turn of its own; any role is written."""

LLAMA_3 = """{{- bos_token }}{% set header = '<|start_header_id|>%s<|end_header_id|>\n\n' %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- header | format('system') + 'Today: ' + '1 Jan' + '\n\n' + system + '<|eot_id|>' }}
{%- if tools %}{{ header | format('user') }}{% for t in tools %}{{ t | tojson(indent=4) + '\n\n' }}{% endfor %}
{{- '{"name": ..., "parameters": ...}' + messages[0].content | trim + '<|eot_id|>' }}{% set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}{% if m.role == 'tool' %}{{ header | format('ipython') + m.content | tojson + '<|eot_id|>' }}
{%- else %}{{ header | format(m.role) + m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ header | format('assistant') }}{% endif %}"""
"""Messages are trimmed, answers of tools are JSON, tools stand in the first question."""

GEMMA_3 = """{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
"""No system, no tools, and turns alternate."""

TEMPLATES = {
    "qwen_2_5": (QWEN_2_5, "chatml"),
    "qwen_3": (QWEN_3, "chatml"),
    "smollm2": (SMOLLM2, "chatml"),
    "llama_3": (LLAMA_3, "llama"),
    "gemma_3": (GEMMA_3, "gemma"),
}

MERGES = [("t", "h"), ("th", "e"), ("▁", "t"), ("▁", "the"), ("o", "o"), ("t", "oo"), ("too", "l"), ("1", "2")]


def byte_level(family: str) -> PreTrainedTokenizerFast:
    """As those of Qwen, Llama 3 and SmolLM2: tokens are any bytes, so that they may split a character."""
    space = bytes_to_unicode()[32]
    merges = [(left.replace("▁", space), right) for left, right in MERGES]
    backend = Tokenizer(BPE(vocabulary([*bytes_to_unicode().values()], merges), merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return with_special(backend, family)


def byte_fallback(family: str) -> PreTrainedTokenizerFast:
    """As Gemma's: a token per character, `▁` for a space, and tokens of one byte for rare characters."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *string.printable.strip(), "\n", "▁"]
    backend = Tokenizer(BPE(vocabulary(tokens, MERGES), MERGES, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return with_special(backend, family)


def vocabulary(tokens: list[str], merges: list[tuple[str, str]]) -> dict[str, int]:
    """Ids of tokens, and of what is merged of them."""
    return {token: id for id, token in enumerate([*tokens, *map("".join, merges)])}


def with_special(backend: Tokenizer, family: str) -> PreTrainedTokenizerFast:
    """The backend with a family's special tokens, and tags of calls that are single tokens but not special."""
    backend.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    special = {"bos_token": SPECIAL[family][0], "eos_token": END[family]}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        additional_special_tokens=[*SPECIAL[family]],
        clean_up_tokenization_spaces=False,
        **special,
    )


def chat_tokenizer(name: str, make: Callable[[str], PreTrainedTokenizerFast] = byte_level) -> PreTrainedTokenizerFast:
    """A tokenizer with the template of this name."""
    template, family = TEMPLATES[name]
    made = make(family)
    made.chat_template = template
    return made


def spelled(tokenizer: PreTrainedTokenizerFast, text: str, rng: random.Random) -> list[int]:
    """Ids that decode to `text`, cut at random: rarely those that the tokenizer would choose."""
    pieces = []
    while text:
        length = rng.choice([1, 1, 2, 3, 8])
        pieces.append(text[:length])
        text = text[length:]
    return [id for piece in pieces for id in tokenizer.encode(piece, add_special_tokens=False)]


def add(a: int, b: int) -> int:
    """Adds two numbers: a tool.

    Args:
        a: One.
        b: Another.
    """
    return a + b
