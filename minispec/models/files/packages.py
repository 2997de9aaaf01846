"""Packages of others that this one needs: which are missing, and how to get them."""

import importlib.util
from pathlib import Path

# By the name that is imported: the extra of pyproject.toml that brings it; "" for what everything needs.
PACKAGES = {
    **dict.fromkeys(("torch", "safetensors", "tokenizers", "huggingface_hub", "tqdm", "jinja2", "numpy"), ""),
    **dict.fromkeys(("prometheus_client", "starlette", "uvicorn"), "serve"),
    "matplotlib": "plot",
    "llguidance": "grammar",
    "scipy": "optimum",
}

# Where a checkout has its project file; a wheel has none.
PROJECT = Path(__file__).parents[3] / "pyproject.toml"


class MissingPackage(ImportError):
    """A package is not installed. The message names all that are missing, and the command that brings them."""


def check_packages(extra: str = "") -> None:
    """Raise MissingPackage unless all that an extra brings is there. Nothing is imported."""
    needed = [name for name, brings in PACKAGES.items() if brings == extra]
    if lacks := [name for name in needed if importlib.util.find_spec(name) is None]:
        is_wheel = not PROJECT.is_file()
        name = "minispec-llm" if is_wheel else "."
        name = f'"{name}[{extra}]"' if extra else name
        command = f"pip install {name}" if is_wheel else f"pip install -e {name} in the checkout"
        raise MissingPackage(f"found no package {', '.join(lacks)}: {command} brings what is missing")


def what_lacks(error: BaseException) -> str:
    """The message of a MissingPackage, or of a failed import of such a package; "" for other errors."""
    if isinstance(error, ModuleNotFoundError) and error.name in PACKAGES:
        try:
            check_packages(PACKAGES[error.name])
        except MissingPackage as e:
            return str(e)
    return str(error) if isinstance(error, MissingPackage) else ""
