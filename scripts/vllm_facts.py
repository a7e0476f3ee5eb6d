"""What vLLM releases look like where the plugin touches them: names and parameters read from their wheels' source.

    python scripts/vllm_facts.py 0.26.0 0.28.0 0.33.0      # writes tests/plugin/vllm_facts.json

A wheel is 300 MB; only its directory and the dozen files that `compat` names are fetched (HTTP range requests), and only read
by `ast`: nothing is installed, no code is kept. `--folder VERSION=PATH` reads an unpacked release instead.
"""

from __future__ import annotations

import argparse
import ast
import json
import pathlib
import re
import urllib.request
import zipfile
from collections.abc import Callable
from typing import IO, Any, cast

ROOT = pathlib.Path(__file__).resolve().parents[1]
FACTS = ROOT / "tests" / "plugin" / "vllm_facts.json"
INDEX = "https://pypi.org/simple/vllm/"
BLOCK = 1 << 20

Read = Callable[[str], str | None]  # source of "vllm/a/b.py", None if it does not exist


class RangeFile:
    """A file on a web server, read in blocks where it is asked for."""

    def __init__(self, url: str, size: int) -> None:
        self.url, self.size, self.position = url, size, 0
        self._blocks: dict[int, bytes] = {}

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = 0) -> int:
        self.position = offset + (0, self.position, self.size)[whence]
        return self.position

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            last = min(self.size, (number + 1) * BLOCK) - 1
            request = urllib.request.Request(self.url, headers={"Range": f"bytes={number * BLOCK}-{last}"})
            with urllib.request.urlopen(request, timeout=120) as answer:
                if answer.status != 206:
                    raise OSError(f"{self.url}: status {answer.status} to a range request; allowed is 206")
                self._blocks[number] = answer.read()
        return self._blocks[number]

    def read(self, count: int = -1) -> bytes:
        end = self.size if count < 0 else min(self.size, self.position + count)
        parts = []
        while self.position < end:
            number, start = divmod(self.position, BLOCK)
            part = self._block(number)[start : start + end - self.position]
            parts.append(part)
            self.position += len(part)
        return b"".join(parts)


def wheel(version: str) -> Read:
    """Reader of a release's wheel on the package index. Raises LookupError if there is none for Linux on x86-64."""
    request = urllib.request.Request(INDEX, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        files = json.load(answer)["files"]
    named = [f for f in files if re.fullmatch(rf"vllm-{re.escape(version)}-.*manylinux.*x86_64\.whl", f["filename"])]
    if not named:
        raise LookupError(f"vllm {version}: no manylinux x86_64 wheel in {INDEX}")
    archive = zipfile.ZipFile(cast("IO[bytes]", RangeFile(named[0]["url"], named[0]["size"])))
    names = set(archive.namelist())
    return lambda path: archive.read(path).decode() if path in names else None


def folder(root: pathlib.Path) -> Read:
    """Reader of an unpacked release: `root` holds the package's folder `vllm`."""
    return lambda path: (root / path).read_text() if (root / path).exists() else None


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Names of a function's parameters in order."""
    found = function.args
    return [a.arg for a in (*found.posonlyargs, *found.args, *found.kwonlyargs)]


def _bodies(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Statements and those inside if, else and try."""
    found = []
    for statement in statements:
        found.append(statement)
        for part in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try):
                found += _bodies(getattr(statement, part, []))
        if isinstance(statement, ast.Try):
            for handler in statement.handlers:
                found += _bodies(handler.body)
    return found


def fact(read: Read, path: str) -> Any:
    """What `package.module:a.b` is: a list of parameters, "class", "value", or None if it is not there.

    A class' fields and a module's assignments are values; properties are functions of self.
    """
    module, _, names = path.partition(":")
    base = module.replace(".", "/")
    source = read(f"{base}.py") or read(f"{base}/__init__.py")
    if source is None:
        return None
    statements: list[ast.stmt] = ast.parse(source).body
    found: Any = None
    for name in names.split("."):
        found = None
        for statement in _bodies(statements):
            if isinstance(statement, ast.ClassDef) and statement.name == name:
                found, statements = "class", statement.body
            elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and statement.name == name:
                found, statements = parameters(statement), []
            elif isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                    found, statements = "value", []
            if found is not None:
                break
        if found is None:
            return None
    return found


def main() -> int:
    """Read the named releases and write the facts file; facts of other releases in it stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help="releases to read from the package index")
    parser.add_argument("--folder", action="append", default=[], metavar="VERSION=PATH", help="an unpacked release")
    arguments = parser.parse_args()
    from epilora.plugin.compat import touched

    readers = {version: wheel(version) for version in arguments.versions}
    readers |= {
        version: folder(pathlib.Path(path)) for version, _, path in (f.partition("=") for f in arguments.folder)
    }
    facts = json.loads(FACTS.read_text()) if FACTS.exists() else {}
    for version, read in readers.items():
        facts[version] = {path: fact(read, path) for path in touched()}
        missing = [path for path, value in facts[version].items() if value is None]
        print(f"{version}: {len(facts[version])} names, missing: {', '.join(missing) or 'none'}")
    FACTS.write_text(json.dumps(dict(sorted(facts.items())), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
