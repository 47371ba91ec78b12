"""The `nanocore-keygen` command: CURVE keys for engines on TCP and for their clients.

`nanocore-keygen DIR` makes an engine's folder, for `nanocore-engine --curve-dir DIR`.
`nanocore-keygen DIR --client NAME` makes a client's folder, and puts its public key on the engine's
allow-list; with `--admin` it may drain and pause the engine, too. Nothing is ever overwritten; what
holds a secret is its owner's alone.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from nanocore.protocol.errors import ConfigError, KeyFileError
from nanocore.protocol.sockets.curve import (
    ADMINS_FOLDER,
    CLIENT,
    CLIENTS_FOLDER,
    ENGINE,
    create_key_pair,
    load_public_key,
)
from nanocore.system.flags import FlagParser


def build_parser() -> FlagParser:
    parser = FlagParser(
        "nanocore-keygen",
        "Make CURVE keys: an engine's, or, with --client, those of one of its clients.",
        epilog="exit codes: 0 done, 2 nothing done, or not all of it",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="the engine's folder")
    parser.add_argument("--client", metavar="NAME", help="make keys for a client of this name")
    parser.add_argument(
        "--admin",
        action="store_true",
        help="let the client drain and pause the engine, reset its cache, and use high priorities",
    )
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, help="the client's folder (default: ./NAME)"
    )
    return parser


def create_engine(directory: Path) -> list[Path]:
    """Make an engine's folder with an empty allow-list; return the files written.

    Raises:
        KeyFileError: it has keys already, or cannot be written.
    """
    _make_private(directory)
    _make_private(directory / CLIENTS_FOLDER)
    return [*create_key_pair(directory, ENGINE)]


def create_client(directory: Path, name: str, out: Path, is_admin: bool = False) -> list[Path]:
    """Make a client's folder and add its key to the engine's allow-list; return the files.

    is_admin: add it to the administrators' keys, too.

    Raises:
        ConfigError: the name is no file name.
        KeyFileError: a file exists, the engine has no keys, or something cannot be written.
    """
    if not name or name.startswith(".") or "/" in name or not name.isprintable():
        raise ConfigError(
            f"--client {name!r}: it becomes the file {CLIENTS_FOLDER}/NAME.key, so it must be "
            "printable, without a slash, and not start with a dot"
        )
    engine_key = directory / f"{ENGINE}.key"
    load_public_key(engine_key)
    pinned = out / f"{ENGINE}.key"
    folders = [ADMINS_FOLDER] if is_admin else []
    listed = [directory / folder / f"{name}.key" for folder in (*folders, CLIENTS_FOLDER)]
    for path in (*listed, pinned):
        if path.exists():
            raise KeyFileError(f"{path} exists, and keys are never overwritten: remove it first")
    for folder in (path.parent for path in (*listed, pinned)):
        _make_private(folder)
    public, secret = create_key_pair(out, CLIENT)
    _copy(engine_key, pinned)
    for path in listed:  # the allow-list last: from here on the client is served
        _copy(public, path)
    return [public, secret, pinned, *listed]


def _make_private(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise KeyFileError(f"folder {directory} cannot be made: {error.strerror}") from None


def _copy(source: Path, target: Path) -> None:
    try:
        with source.open("rb") as reader, target.open("xb") as writer:
            shutil.copyfileobj(reader, writer)
        target.chmod(0o644)
    except OSError as error:
        raise KeyFileError(f"{target} cannot be written: {error.strerror}") from None


def main(arguments: list[str] | None = None) -> int:
    """Make the keys, and print the next step; return the exit code."""
    try:
        args = build_parser().parse_args(arguments)
        directory: Path = args.directory
        if args.client is not None:
            out = args.out or Path(args.client)
            written = create_client(directory, args.client, out, args.admin)
            then = (
                f"give {out} to the client, which may connect from now on:\n"
                f"  AsyncEngineClient.connect('tcp://ADDRESS:PORT', curve_dir={str(out)!r})"
            )
        elif args.out is not None or args.admin:
            flag = "--admin" if args.out is None else f"--out {args.out}"
            raise ConfigError(f"{flag} needs --client; an engine's folder is DIR")
        else:
            written = create_engine(directory)
            then = (
                "next:\n"
                f"  nanocore-keygen {directory} --client NAME --out FOLDER\n"
                f"  nanocore-engine --listen tcp://ADDRESS:PORT --curve-dir {directory}"
            )
    except ConfigError as error:
        print(f"nanocore-keygen: {error}", file=sys.stderr)
        return error.exit_code
    for path in written:
        print(f"wrote {path}")
    print(then)
    return 0


if __name__ == "__main__":
    sys.exit(main())
