"""A directory with a short path that belongs to one with a long path, in which sockets would have too long ones.

A symbolic link in the long one names it. So whoever removes that one finds the other, too, after a kill -9 as well.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from novainfer.errors import ConfigError
from novainfer.transport.addresses import is_private

PREFIX = "nova-ray-"  # of the names of short ones
_PLACE = "/tmp"  # where there is none in the system's temporary directory, whose path may be long itself


def make_short_dir(link: Path, longest: int) -> Path:
    """A new private directory whose path has at most so many bytes; the one that `link` named before is removed.

    Raises `ConfigError` if there is none, or no room for it.
    """
    remove_short_dir(link)
    own = tempfile.gettempdir()
    name_length = len(PREFIX) + 9  # with the slash; mkdtemp appends eight characters
    place = own if len(os.fsencode(own)) + name_length <= longest else _PLACE
    try:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    except OSError as error:
        raise ConfigError(f"no directory with a short path can be made in {place}: {error.strerror}") from None
    try:
        link.symlink_to(path)
    except OSError as error:
        path.rmdir()
        raise ConfigError(f"{link} cannot be made: {error.strerror}") from None
    return path


def remove_short_dir(link: Path) -> None:
    """Remove the link, and the directory that it names. What is no such link stays, and so does a directory that is not
    ours alone.
    """
    try:
        path = Path(os.readlink(link))
    except OSError:  # there is none, or it is no link
        return
    if not (path.is_absolute() and path.name.startswith(PREFIX)):
        return
    try:
        is_ours = is_private(path.lstat())
    except OSError:
        is_ours = False
    if is_ours:
        shutil.rmtree(path, ignore_errors=True)
    link.unlink(missing_ok=True)
