"""`notebooks/train_your_own.ipynb` runs from its first cell to its last."""

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.slow

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "train_your_own.ipynb"


@pytest.mark.filterwarnings("ignore")  # those of Jupyter's own packages
def test_notebook_trains_explains_and_exports(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(NOTEBOOK, 4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    install, data = (cell for cell in notebook.cells if "%pip" in cell.source or "MINUTES = " in cell.source)
    install.source = ""
    data.source = data.source.replace("MINUTES = 5", "MINUTES = 0.03")

    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()

    answers = [cell.outputs for cell in notebook.cells if cell.source.startswith("import hf_vit_scratch")][0]
    assert answers[-1]["data"]["text/plain"].count("'score'") == 3
    assert (tmp_path / "runs" / "my_photos" / "onnx" / "model.onnx").is_file()
    assert len(list((tmp_path / "pictures").glob("*_class_attention.png"))) == 1
    printed = "".join(output.get("text", "") for output in notebook.cells[-1].outputs)
    assert '"predictions"' in printed
    assert "error" not in printed
