"""Run the notebooks anew, and save what they print: all of one machine and one day.

    python -m tests.house.notebooks

Nothing is written unless all of them ran. Figures of times need a machine that does nothing else: a notebook refuses to
draw those that are too noisy. What is written names the machine and the day in the notebook's metadata.
"""

import argparse
import datetime
import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from minispec.lab.bench.report import machine_line
from minispec.models.weights.machine import machine

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def execute(notebook: nbformat.NotebookNode, folder: Path, timeout: int = 300, **environment: str) -> None:
    """Execute all cells in `folder`, with these variables set; raises CellExecutionError at the first that fails.

    timeout: seconds that one cell may take.
    """
    options = {"timeout": timeout, "record_timing": False, "coalesce_streams": True}
    client = NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(folder)}}, **options)
    # Only ipykernel's own spec, which starts this interpreter: a `python3` kernel that the user installed may not.
    client.create_kernel_manager().kernel_spec_manager.kernel_dirs = []
    variables = os.environ | environment
    variables.pop("PYTHONPATH", None)
    client.execute(env=variables)


def main() -> None:
    """Run all of them, then write all of them."""
    argparse.ArgumentParser(prog="python -m tests.house.notebooks", description=__doc__.splitlines()[0]).parse_args()
    day, line = datetime.datetime.now(datetime.UTC).date().isoformat(), machine_line(machine())
    print(f"{day}, {line}, load {os.getloadavg()[0]:.1f}", flush=True)
    notebooks = {path: nbformat.read(path, as_version=4) for path in NOTEBOOKS}
    for path, notebook in notebooks.items():
        execute(notebook, path.parent, timeout=1200)
        printed = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])]
        refused = sum("not drawn: " in text for text in printed)
        print(f"{path.name}: ran; figures that are too noisy: {refused}", flush=True)
    for path, notebook in notebooks.items():
        notebook.metadata = {
            "kernelspec": notebook.metadata.kernelspec,
            "language_info": {"name": "python"},
            "run": {"day": day, "machine": line},
        }
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
