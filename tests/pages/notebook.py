"""Runs the notebook of the tutorials and writes its outputs.

python -m tests.pages.notebook
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
from typing import Any

from docs.tables import ROOT

PATH = ROOT / "docs" / "tutorials" / "resnet50.ipynb"
DPI = 80


def run_cell(source: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the outputs of a code cell: its printed text, and the figure that its last expression returns."""
    *statements, last = ast.parse(source).body
    expression = ast.Expression(last.value) if isinstance(last, ast.Expr) else None
    rest: list[ast.stmt] = statements if expression else [*statements, last]
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(rest, []), str(PATH), "exec"), namespace)
        if expression:
            value = eval(compile(expression, str(PATH), "eval"), namespace)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    if hasattr(value, "savefig"):
        file = io.BytesIO()
        value.savefig(file, format="png", dpi=DPI, transparent=True, metadata={"Software": None})
        picture = base64.b64encode(file.getvalue()).decode()
        outputs.append({"data": {"image/png": picture}, "metadata": {}, "output_type": "display_data"})
    return outputs


def main() -> None:
    content = json.loads(PATH.read_text())
    namespace: dict[str, Any] = {}
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, 1):
        cell["execution_count"], cell["outputs"] = number, run_cell("".join(cell["source"]), namespace)
    PATH.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
