"""How questions become prompts: templates from files, chat templates, the answer prefix; and what rewards see of it."""

from pathlib import Path
from typing import Any

import pytest
from helpers.chats import TAGS
from helpers.fitting import Echo
from helpers.tiny import VOCABULARY, model_of, policy_of, tokenizer
from tokenizers.processors import TemplateProcessing

from grpo_lightning import FormatReward, Policy, Sampling, Scorer, Task, TaskData
from grpo_lightning.types import FinishReason, Prompt, Question, Sample, UsageError

QUESTION = Question("12", "3")


def test_a_template_file_that_cannot_be_used_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "none.txt").write_text("Q: \nA:")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe{question}")
    for name, expected in (("none.txt", "must contain {question}"), ("bytes.txt", "UTF-8"), ("no.txt", "looked in")):
        with pytest.raises(UsageError, match=rf"data.template_file=.*{name}: .*{expected}"):
            TaskData(Echo(), template_file=str(tmp_path / name))
    with pytest.raises(UsageError, match="it cannot be read"):
        TaskData(Echo(), template_file=str(tmp_path))


def test_the_prompt_ends_with_the_answer_prefix() -> None:
    plain = loaded(policy_of(), template="{question}?", answer_prefix="ab").prompt(QUESTION, 0)
    assert (plain.text, plain.answer_prefix) == ("12?ab", "ab")
    assert plain.token_ids == tokenizer().encode("12?ab")
    chat = loaded(chatting(TAGS), chat=True, answer_prefix="ab").prompt(QUESTION, 0)
    assert chat.text == "<user>12<assistant>ab"
    without = loaded(chatting(TAGS), chat=True).prompt(QUESTION, 0)
    assert (without.text, without.answer_prefix) == ("<user>12<assistant>", "")


@pytest.mark.parametrize(
    ("prompt", "prefix", "text", "turn"),
    [
        ("Q", "", "42", "42"),
        ("Q<answer>", "<answer>", "42</answer>", "<answer>42</answer>"),
        ("Q<think>\n", "", "so</think>", "<think>so</think>"),
        ("Q<think>", "<think>", "so</think>", "<think>so</think>"),
        ("Q<think>\nWell,", "Well,", " so</think>", "<think>Well, so</think>"),
    ],
)
def test_verifier_and_format_read_the_whole_turn(prompt: str, prefix: str, text: str, turn: str) -> None:
    asked = Prompt(0, prompt, [1], Question("What is 40 + 2?", "42"), prefix)
    assert Sample(asked, text, [1], FinishReason.STOP).whole_turn == turn


@pytest.mark.parametrize(("longer", "key"), [("train", "sampling"), ("val", "validation.sampling")])
def test_prompts_leave_room_for_the_longest_completion_of_their_split(longer: str, key: str) -> None:
    """Prompts of at most 7 tokens in a context of 20."""
    policy = policy_of()
    policy.model.config.max_position_embeddings = 20
    train, val = (Sampling(max_new_tokens=14 if split == longer else 5) for split in ("train", "val"))
    with pytest.raises(UsageError, match=rf"7 tokens, and with {key}.max_new_tokens=14") as raised:
        TaskData(Echo()).load("fit", policy, train, Scorer([FormatReward()]), val_sampling=val)
    assert ("limit_val_batches" in str(raised.value)) is (longer == "val")
    TaskData(Echo()).load("fit", policy, train if longer == "val" else val, Scorer([FormatReward()]))


def test_val_limit_is_of_validation_alone() -> None:
    questions = loaded(policy_of(), val_limit=5).questions
    assert [len(questions["train"]), len(questions["val"])] == [24, 5]


class Asks(Task):
    """These questions, in every split."""

    def __init__(self, *questions: str | Question) -> None:
        self.asked = [
            Question(one, "1", f"asks:{row}") if isinstance(one, str) else one for row, one in enumerate(questions)
        ]

    def questions(self, split: str) -> list[Question]:
        return self.asked


def loaded(policy: Policy, *questions: str | Question, **options: Any) -> TaskData:
    """The prompts of these questions, or of `Echo`."""
    prompts = TaskData(Asks(*questions) if questions else Echo(), **options)
    prompts.load("fit", policy, Sampling(max_new_tokens=8), Scorer([FormatReward()]))
    return prompts


def chatting(chat_template: str, **options: Any) -> Policy:
    policy = policy_of(**options)
    policy.tokenizer.chat_template = chat_template
    return policy


def test_a_tokenizer_that_appends_the_end_token_makes_the_same_prompts() -> None:
    policy = policy_of()
    expected = loaded(policy, "12").prompt(QUESTION, 0).token_ids
    backend = policy.tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 5)])
    assert loaded(policy, "12").prompt(QUESTION, 0).token_ids == expected == [7, 8]
    backend.post_processor = TemplateProcessing(single="<bos> $A <end>", special_tokens=[("<bos>", 2), ("<end>", 5)])
    assert loaded(policy, "12").prompt(QUESTION, 0).token_ids == [2, 7, 8]


@pytest.mark.parametrize("end", ["<end>", "<eos>"])
def test_a_prompt_that_ends_with_a_stop_token_is_refused_before_the_run(end: str) -> None:
    """In the second row, where no prompt is encoded for its length, in the template, and in that of a chat."""
    said = rf"asks:{{}}: the prompt ends with '{end}', which ends an answer before it begins"
    with pytest.raises(UsageError, match=said.format(1)):
        loaded(policy_of(), "1", f"2{end}")
    with pytest.raises(UsageError, match=said.format(0)):
        loaded(policy_of(), "1", template=f"{{question}}{end}")
    headless = chatting("{% for m in messages %}{{ m.content + '" + end + "' }}{% endfor %}")
    with pytest.raises(UsageError, match=said.format(0)):
        loaded(headless, "1", chat=True)
    # Elsewhere it ends nothing.
    assert loaded(policy_of(), f"1{end}2").prompt(Question(f"1{end}2", ""), 0).token_ids[-1] == 8


def test_stop_tokens_are_known_before_the_weights_are_read(tmp_path: Path) -> None:
    model, spell = model_of("llama"), tokenizer()
    model.config.eos_token_id = None
    model.generation_config.eos_token_id = [9, 5000]  # the tokenizer has no token for the last
    model.save_pretrained(tmp_path)
    spell.save_pretrained(tmp_path)
    policy = Policy(str(tmp_path))
    assert policy.stop_ids == {9, 5, 5000}
    with pytest.raises(UsageError, match=r"asks:0: the prompt ends with '3'"):
        loaded(policy, "123")
    (tmp_path / "generation_config.json").unlink()
    assert Policy(str(tmp_path)).stop_ids == {5}


def test_a_token_without_an_embedding_is_refused_in_the_prompt_that_has_it() -> None:
    small = chatting(TAGS, vocab_size=VOCABULARY - 1)
    last = tokenizer().convert_ids_to_tokens(VOCABULARY - 1)
    with pytest.raises(
        UsageError, match=rf"asks:2: the prompt has the token '{last}' with id 63, and the embedding of .* has 63 rows"
    ):
        loaded(small, "1", "2", f"3{last}4")
    assert loaded(small, "1", "2").prompt(QUESTION, 0).token_ids == [7, 8]


def test_the_variables_of_a_chat_template() -> None:
    thinking = TAGS + "{% if think is defined and not think %}.{% endif %}"
    for kwargs, end in (({"think": False}, "."), ({}, "")):
        prompts = loaded(chatting(thinking), chat=True, chat_template_kwargs=kwargs)
        assert prompts.prompt(QUESTION, 0).text == f"<user>12<assistant>{end}"
    with pytest.raises(UsageError, match=r"data.chat_template_kwargs: .* set data.chat=true"):
        TaskData(Echo(), chat_template_kwargs={"think": False})


def test_every_question_must_stand_in_its_prompt() -> None:
    squeezing = chatting(TAGS.replace("m.content", "m.content | replace('aa', 'a')"))
    with pytest.raises(
        UsageError, match=r"asks:1: data.chat=true: .* leaves out or changes '1aa2'; set data.chat=false"
    ):
        loaded(squeezing, "12", "1aa2", chat=True)


def test_a_row_that_is_a_conversation() -> None:
    system = {"role": "system", "content": "Add"}
    row = Question("12", "3", "rows:1", history=[system])
    assert (
        loaded(chatting(TAGS), row, chat=True, template="{question}z").render(row) == "<system>Add<user>12z<assistant>"
    )
    with pytest.raises(UsageError, match=r"rows:1: it is a conversation; set data.chat=true"):
        loaded(policy_of(), row)
    with pytest.raises(UsageError, match=r"rows:1: it has a system turn of its own; leave data.system empty"):
        loaded(chatting(TAGS), row, chat=True, system="Sum")


def test_a_template_that_ends_with_the_answer_prefix_is_refused() -> None:
    for template in ("{question} <think>", "{question}<think>\n", "<think> {question} <think>"):
        with pytest.raises(UsageError, match=r"data.answer_prefix='<think>': data.template ends with it too"):
            TaskData(Echo(), template=template, answer_prefix="<think>")
    TaskData(Echo(), template="Use <think>. {question}", answer_prefix="<think>")
    TaskData(Echo(), template="{question}<think>", answer_prefix="Well")


@pytest.mark.parametrize("chat", [False, True])
def test_special_tokens_are_added_where_no_chat_template_has_written_them(chat: bool) -> None:
    policy = chatting(TAGS)
    policy.tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A", None, [("<bos>", 2)])
    assert (loaded(policy, chat=chat).encode("ab")[0] == 2) is (not chat)
