"""The proxy starts without the trainer's world."""

from __future__ import annotations

import subprocess
import sys


def test_the_proxy_pulls_in_none_of_the_heavy_packages() -> None:
    program = (
        "import sys, lightning_rl.proxy.app, lightning_rl.proxy.commands, lightning_rl.proxy.engine_watch\n"
        "heavy = {'torch', 'trl', 'litellm', 'transformers', 'peft', 'accelerate', 'numpy', 'vllm'}\n"
        "found = sorted(heavy & set(sys.modules))\n"
        "found += [n for n in sys.modules if n.startswith('lightning_rl.trainer')]\n"
        "sys.exit(', '.join(found) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_command_itself_imports_next_to_nothing() -> None:
    program = (
        "import sys, lightning_rl.proxy.commands\n"
        "found = sorted({'fastapi', 'aiohttp', 'sqlalchemy', 'uvicorn'} & set(sys.modules))\n"
        "sys.exit(', '.join(found) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
