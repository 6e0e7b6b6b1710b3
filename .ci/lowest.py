"""Print the lower bound of every requirement in pyproject.toml as a pip constraint."""

import re
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
wanted = list(project["dependencies"])
extras = project["optional-dependencies"]
wanted += [line for extra in ("plot", "ray", "train") for line in extras[extra]]
for line in sorted(set(wanted)):
    name, version = re.match(r"([\w-]+)>=([\w.]+)", line).groups()
    print(f"{name}=={version}")
