"""What becomes of a page's blocks: a folder and variables they share, and lies that are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import read_blocks
from tests.docs.session import BlockFailed, Session


def play(place: Path, page: str) -> Session:
    session = Session(place)
    for block in read_blocks(page, "page.md"):
        session.play(block)
    session.end()
    return session


def test_blocks_of_a_page_share_its_folder_and_what_shells_export(tmp_path: Path) -> None:
    play(
        tmp_path,
        "```sh\nmkdir inner\ncd inner\nexport WORD=said\n```\n"
        "<!-- file: inner/words.txt -->\n```text\nwritten\n```\n"
        "```sh\necho $WORD $(cat words.txt) $(basename $PWD)\n```\n\n"
        "```text\nsaid written inner\n```\n"
        "```python\nprint(open('inner/words.txt').read())\n```\n\n```text\nwritten\n```\n"
        "```sh\nls ../path/to/folder/config.json\n```\n",
    )


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("```sh\nfalse\ntrue\n```\n", "ended with 1, not 0"),
        ("```sh\nfalse | cat\n```\n", "ended with 1, not 0"),
        ("```sh\necho $NOTHING\n```\n", "ended with 1, not 0"),
        ("<!-- exit code: 2 -->\n```sh\ntrue\n```\n", "ended with 0, not 2"),
        ("```sh\necho a\n```\n\n```text\nb\n```\n", "the page says that it prints"),
        ("```python\nraise SystemExit(3)\n```\n", "ended with 3, not 0"),
        ("<!-- background: ready -->\n```sh\necho no\n```\n", "did not print 'ready'"),
        (
            "<!-- background: up -->\n```sh\ntrap 'exit 3' INT\nmkfifo never\necho up\n"
            "read word < never\n```\n",
            "ended with 3",
        ),
    ],
)
def test_a_block_that_does_something_else_than_its_page_says_is_found(
    tmp_path: Path, page: str, words: str
) -> None:
    with pytest.raises(BlockFailed, match=words):
        play(tmp_path, page)


def test_what_stays_in_the_background_is_there_for_later_blocks_and_ends_by_ctrl_c(
    tmp_path: Path,
) -> None:
    play(
        tmp_path,
        "<!-- background: up -->\n```sh\ntrap 'echo over > ended; exit 130' INT\n"
        "mkfifo door\necho up\nread word < door\necho $word > heard\nmkfifo never\n"
        "read word < never\n```\n"
        "```sh\necho hello > door\nuntil [ -s heard ]; do :; done\ncat heard\n```\n\n"
        "```text\nhello\n```\n",
    )
    assert (tmp_path / "page" / "ended").read_text() == "over\n"
