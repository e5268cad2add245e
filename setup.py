"Packaging: every value comes from settings.ini, the one place that nbdev reads too"
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

here = Path(__file__).parent
parser = ConfigParser(delimiters=["="])
parser.read(here / "settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    license="Apache-2.0",
    keywords=cfg["keywords"],
    packages=find_packages(include=["minisgl_edu", "minisgl_edu.*"]),
    package_data={"minisgl_edu": ["*.html"]},
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
    extras_require={"dev": cfg["dev_requirements"].split()},
    entry_points={"console_scripts": cfg["console_scripts"].split()},
)
