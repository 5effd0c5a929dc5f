"""Plain manifests, for those who do not use Helm: some of the chart's value sets, rendered (`make manifests`)."""

from __future__ import annotations

from pathlib import Path

import helm_python as helm

FOLDER = Path(__file__).resolve().parent
CHART = FOLDER.parent / "helm" / "novainfer"
RELEASE, NAMESPACE = "llm", "default"
FILES = ("cpu", "gpu", "kuberay")
HEAD = "# Rendered from deploy/helm/novainfer with ci/{name}-values.yaml by `make manifests`: change it there.\n"


def rendered() -> dict[Path, str]:
    """The files, and what is to be in them."""
    chart = helm.Chart.load(str(CHART))
    found = {}
    for name in FILES:
        values = (CHART / "ci" / f"{name}-values.yaml").read_text(encoding="utf-8")
        texts = chart.render(helm.values_from_yaml(values), name=RELEASE, namespace=NAMESPACE)
        manifests = [text for path, text in sorted(texts.items()) if path.endswith(".yaml") and "/tests/" not in path]
        documents = [part.strip("\n") for text in manifests for part in f"\n{text}".split("\n---\n") if part.strip()]
        found[FOLDER / f"{name}.yaml"] = HEAD.format(name=name) + "---\n" + "\n---\n".join(documents) + "\n"
    return found


if __name__ == "__main__":
    for path, text in rendered().items():
        path.write_text(text, encoding="utf-8")
