from pathlib import Path


def write(folder: Path) -> Path:
    path = folder / "report.html"
    path.write_text("<p>soon</p>")
    return path
