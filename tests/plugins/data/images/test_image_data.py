"""Questions with images: from tables into prompts, and the messages of what cannot be read."""

import base64
import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from make_seeing_policy import IMAGE, PIXELS, SIDE, make_model, make_processor
from PIL import Image

from grpo_lightning import (
    HubPrompts,
    JsonPrompts,
    MathVerifier,
    Policy,
    PromptDataModule,
    Question,
    Sampling,
    Scorer,
    UsageError,
)
from grpo_lightning.plugins.console.display.data_line import keys_of
from grpo_lightning.plugins.data.images.pictures import in_rgb, thumbnail
from grpo_lightning.plugins.data.images.pixels import Pixels, key_of
from grpo_lightning.types import PromptImages

NUM_PATCHES = SIDE**2
"""Tokens of an image of the tiny model."""
SIZE = (SIDE * PIXELS, SIDE * PIXELS)
CHAT = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}(<image>){% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""A chat template that writes an image in parentheses."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that sees, with its processor."""
    folder = tmp_path_factory.mktemp("seeing")
    torch.manual_seed(0)
    processor = make_processor()
    make_model(processor, hidden=64, layers=1).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    """A red, a green and a blue picture."""
    paths = []
    for name in ("red", "green", "blue"):
        paths.append(tmp_path / "pictures" / f"{name}.png")
        paths[-1].parent.mkdir(exist_ok=True)
        Image.new("RGB", SIZE, name).save(paths[-1])
    return paths


def data_of(task: Any, policy: Policy, stage: str = "predict", max_new_tokens: int = 8, **options: Any) -> Any:
    data = PromptDataModule(task, **options)
    data.load(stage, policy, Sampling(max_new_tokens=max_new_tokens), Scorer([MathVerifier()]))
    return data


def written(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def colour(images: PromptImages | None, index: int = 0) -> list[int]:
    """The colour of an image of one colour, from pixels that are -1 to 1."""
    assert isinstance(images, Pixels)
    return [round(float(channel.mean()) * 127.5 + 127.5) for channel in images.inputs["pixel_values"][index]]


RED, GREEN, BLUE = [255, 0, 0], [0, 128, 0], [0, 0, 255]


def test_json_lines_have_paths_and_lists_of_paths(folder: Path, pictures: list[Path], tmp_path: Path) -> None:
    rows = [
        {"question": "Which?", "answer": "1", "picture": "pictures/red.png", "level": 3},
        {"question": "Is <image> like <image>?", "answer": "2", "picture": ["pictures/green.png", str(pictures[2])]},
        {"question": "1+1=", "answer": "2", "picture": None},
    ]
    path = written(tmp_path / "rows.jsonl", rows)
    data = data_of(JsonPrompts(predict=str(path), images="picture"), Policy(str(folder)), template="Q: {question} A:")
    one, two, none = (data.prompt(question, row) for row, question in enumerate(data.questions["predict"]))

    assert one.text == "<image>Q: Which? A:"
    assert one.token_ids.count(data.policy.config.image_token_id) == NUM_PATCHES
    assert colour(one.images) == RED
    assert one.question.metadata == {"picture": "pictures/red.png", "level": 3}
    assert two.text == "Q: Is <image> like <image>? A:"
    assert len(two.token_ids) == len("Q: Is  like ? A:") + 2 * NUM_PATCHES
    assert [colour(two.images, index) for index in (0, 1)] == [GREEN, BLUE]
    assert none.images is None
    assert none.text == "Q: 1+1= A:"
    for prompt in (one, two):
        assert data.num_tokens(prompt.question, prompt.text) == len(prompt.token_ids)


@pytest.mark.parametrize("kind", ["csv", "bytes", "datasets", "pil", "hub"])
def test_other_tables(folder: Path, pictures: list[Path], tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("rows.csv" if kind == "csv" else "rows.parquet")
    if kind == "csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([["question", "answer", "image"], ["Which?", "1", "pictures/green.png"]])
    elif kind == "bytes":
        datasets.Dataset.from_dict(
            {"question": ["Which?"], "answer": ["1"], "image": [pictures[1].read_bytes()]}
        ).to_parquet(path)
    else:
        features = {"question": datasets.Value("string"), "answer": datasets.Value("string")}
        features["image"] = datasets.List(datasets.Image()) if kind == "hub" else datasets.Image()
        cell: Any = (
            Image.new("RGB", SIZE, "green")
            if kind == "pil"
            else {"bytes": pictures[1].read_bytes(), "path": "green.png"}
        )
        columns = {"question": ["Which?"], "answer": ["1"], "image": [[cell] if kind == "hub" else cell]}
        table = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
        table.to_parquet(path)
        for picture in pictures:  # The table holds them.
            picture.unlink()
    task: Any = JsonPrompts(predict=str(path), images="image")
    if kind == "hub":
        task = HubPrompts(str(tmp_path), predict="train", images="image")
    data = data_of(task, Policy(str(folder)))
    [question] = data.questions["predict"]
    assert colour(data.prompt(question, 0).images) == GREEN
    assert "bytes" not in json.dumps(question.metadata)


def test_a_chat_has_images_as_parts(folder: Path, pictures: list[Path], tmp_path: Path) -> None:
    policy = Policy(str(folder))
    policy.tokenizer.chat_template = CHAT
    image = {"type": "image"}
    rows = [
        {"question": "Which?", "image": "pictures/red.png"},
        {
            "question": [{"role": "user", "content": [{"type": "text", "text": "See "}, image, image]}],
            "image": [str(p) for p in pictures[:2]],
        },
        {
            "question": [
                {"role": "user", "content": [image, {"type": "text", "text": "This?"}]},
                {"role": "assistant", "content": "No."},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "That?"}, {"type": "image", "image": "pictures/blue.png"}],
                },
            ],
            "image": None,
        },
    ]
    rows[2]["question"][0]["content"][0] = {"type": "image", "path": "pictures/green.png"}
    path = written(tmp_path / "rows.jsonl", [row | {"answer": "1"} for row in rows])
    data = data_of(
        JsonPrompts(predict=str(path), images="image"), policy, chat=True, system="Look.", answer_prefix="<think>"
    )
    prompts = [data.prompt(question, row) for row, question in enumerate(data.questions["predict"])]
    assert [prompt.text for prompt in prompts] == [
        "[system]Look.[user](<image>)Which?[assistant]<think>",
        "[system]Look.[user]See (<image>)(<image>)[assistant]<think>",
        "[system]Look.[user](<image>)This?[assistant]No.[user]That?(<image>)[assistant]<think>",
    ]
    colours = [[colour(prompt.images, index) for index in range(len(prompt.question.images))] for prompt in prompts]
    assert colours == [[RED], [RED, GREEN], [GREEN, BLUE]]
    for prompt in prompts:
        assert data.num_tokens(prompt.question, prompt.text) == len(prompt.token_ids)


def test_a_plain_prompt_marks_an_image_as_the_chat_template_does(folder: Path) -> None:
    policy = Policy(str(folder))
    data = PromptDataModule(Images([Question("Which?", "1", "row", images=(Image.new("RGB", SIZE),))]))
    data.load("predict", policy, Sampling(max_new_tokens=8), Scorer([MathVerifier()]))
    assert data.render(data.questions["predict"][0]) == "<image>Which?"
    data.image_prompts.encoder.processor.chat_template = CHAT
    assert data.image_prompts.encoder._mark() == "(<image>)"


class Images:
    """A task of given questions."""

    grader = "MathVerifier"

    def __init__(self, questions: Sequence[Question]) -> None:
        self.rows = questions

    def questions(self, split: str) -> Sequence[Question]:
        return self.rows


MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "marks": (
        {"question": "<image> or <image>?", "image": "pictures/red.png"},
        {},
        r"rows.jsonl:1: it says <image> 2 times, and has 1 images",
    ),
    "absent": (
        {"question": "?", "image": "pictures/none.png"},
        {},
        r"rows.jsonl:1: .*none.png cannot be read as an image \(.*No such file",
    ),
    "text": ({"question": "?", "image": "rows.jsonl"}, {}, r"rows.jsonl:1: .*rows.jsonl cannot be read as an image"),
    "column": ({"question": "?"}, {}, r"rows.jsonl:1: no column 'image' \(data.task.images='image'\)"),
    "template": (
        {"question": "?", "image": "pictures/red.png"},
        {"chat": True},
        "data.chat=true: the tokenizer .* has no chat template",
    ),
    "token": (
        {"question": "<image>?", "image": "pictures/red.png"},
        {"template": "{question} <image>"},
        "says <image> 2 times",
    ),
    "context": (
        {"question": "?" * 90, "image": "pictures/red.png"},
        {"max_new_tokens": 30},
        r"rows.jsonl:1: the prompt has 99 tokens, and with sampling.max_new_tokens=30 it exceeds",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_names_the_row(folder: Path, pictures: list[Path], tmp_path: Path, name: str) -> None:
    row, options, message = MISTAKES[name]
    path = written(tmp_path / "rows.jsonl", [row | {"answer": "1"}])
    with pytest.raises(UsageError, match=message):
        data_of(JsonPrompts(predict=str(path), images="image"), Policy(str(folder)), **options)


def test_questions_that_do_not_fit_with_their_images_are_left_out(
    folder: Path, pictures: list[Path], tmp_path: Path
) -> None:
    # 128 - 30 = 98 tokens: 89 characters and 9 of the image fit.
    rows = [{"question": "?" * length, "answer": "1", "image": "pictures/red.png"} for length in (89, 90)]
    path = written(tmp_path / "rows.jsonl", rows)
    data = data_of(
        JsonPrompts(predict=str(path), images="image"), Policy(str(folder)), max_new_tokens=30, skip_long=True
    )
    assert [len(question.text) for question in data.questions["predict"]] == [89]


def test_an_image_part_without_an_image(folder: Path, tmp_path: Path) -> None:
    rows = [{"question": [{"role": "user", "content": [{"type": "image"}]}], "answer": "1"}]
    path = written(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UsageError, match=r"rows.jsonl:1: .* shows an image: set data.task.images"):
        JsonPrompts(predict=str(path)).questions("predict")


def test_a_template_that_leaves_images_out(folder: Path) -> None:
    policy = Policy(str(folder))
    policy.tokenizer.chat_template = CHAT.replace("(<image>)", "")
    task = Images([Question("Which?", "1", "row 7", images=(Image.new("RGB", SIZE),))])
    with pytest.raises(UsageError, match="row 7: the prompt has the image token <image> 0 times for 1 images"):
        data_of(task, policy, chat=True)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ImportError("Qwen2VLVideoProcessor requires the Torchvision library but"),
            "needs the package torchvision: pip install",
        ),
        (ImportError("Package `num2words` is required to run"), "needs the package num2words: pip install num2words"),
        (OSError("Can't load image processor for"), "there is no processor of images .*leave out data.task.images"),
    ],
)
def test_a_missing_package_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", fail)
    task = Images([Question("Which?", "1", "row", images=(Image.new("RGB", SIZE),))])
    with pytest.raises(UsageError, match=message):
        data_of(task, Policy(str(folder)))


def test_a_model_of_text_is_refused(policy_folder: Path) -> None:
    task = Images([Question("Which?", "1", "row", images=(Image.new("RGB", SIZE),))])
    with pytest.raises(UsageError, match=r"the processor there takes none\. Use a model that sees"):
        data_of(task, Policy(str(policy_folder)))


def test_an_engine_of_text_is_refused(folder: Path) -> None:
    data = PromptDataModule(Images([Question("Which?", "1", "row 7", images=(Image.new("RGB", SIZE),))]))
    data.text_engine = "VLLMEngine"
    with pytest.raises(
        UsageError, match=r"model\.engine=VLLMEngine: row 7 has images, and this engine reads text alone"
    ):
        data.load("predict", Policy(str(folder)), Sampling(), Scorer([MathVerifier()]))


def test_what_is_transparent_becomes_white() -> None:
    assert in_rgb(Image.new("RGBA", (2, 2), (0, 0, 0, 0)), "row").getpixel((0, 0)) == (255, 255, 255)


def test_a_picture_lies_on_its_side_no_more() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # Turn it by 90 degrees.
    file = io.BytesIO()
    Image.new("RGB", (4, 2)).save(file, "jpeg", exif=exif)
    assert in_rgb(file.getvalue(), "row").size == (2, 4)


def test_a_thumbnail_is_small() -> None:
    address = thumbnail(Image.effect_noise((1024, 512), 50), "row")
    kind, _, data = address.partition(",")
    assert kind == "data:image/jpeg;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
        assert picture.size == (256, 128)


def test_the_tokens_of_an_image_are_counted_once_per_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = data_of(Images([Question("?", "1", "row", images=(Image.new("RGB", SIZE),))] * 5), Policy(str(folder)))
    encoder = data.image_prompts.encoder
    assert encoder.token == IMAGE
    assert encoder._added_by_sizes == {(SIZE,): NUM_PATCHES - 1}


def test_questions_with_other_images_are_distinct() -> None:
    pictures = [Image.new("RGB", SIZE, name) for name in ("red", "green", "red")]
    questions = [Question("How many?", "1", images=(image,)) for image in (*pictures, "a.png", Path("a.png"), b"png")]
    assert len({*keys_of(questions)}) == 4


def test_images_of_equal_bytes_and_other_shapes_have_other_keys() -> None:
    keys = [key_of({"pixel_values": torch.zeros(1, 3, *shape)}) for shape in ((2, 4), (4, 2), (2, 4))]
    assert keys[0] == keys[2] != keys[1]
