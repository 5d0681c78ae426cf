"""Where a page may be written, never over a run's own files; and writing it."""

from pathlib import Path

from grpo_lightning.types import UsageError

ENDINGS = (".html", ".htm")


def check_out(out: Path, default: str) -> None:
    """Finds before the runs are read what would fail, or destroy something, after.

    Args:
        out: The file that the user named.
        default: A page's name, for messages.

    Raises:
        UsageError: The file is none that a page can be written to.
    """
    if out.is_dir():
        raise UsageError(f"--out {out}: that is a folder. Give the name of a page, such as {out / default}")
    if out.suffix.lower() not in ENDINGS:
        example = out.with_suffix(".html") if out.name else Path(default)
        raise UsageError(f"--out {out}: give the name of a page, such as {example}")


def write_whole(path: Path, text: str) -> None:
    """Writes a text file so that a reader sees the old one or all of the new one.

    That of `training.disk` does the same, but its floor imports torch.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            file.write(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
