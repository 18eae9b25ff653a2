"""The build step that pyproject.toml cannot state: `recipes/` becomes `burnish/recipes/` in a wheel.

An editable install reads `recipes/` of the checkout (`burnish.config.recipe_names`).
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """Copy the recipes, and the Python files that they name, beside the package's modules."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "burnish" / "recipes"
        self.mkpath(str(target))
        for path in sorted(Path("recipes").iterdir()):
            if path.suffix in (".yaml", ".py"):
                self.copy_file(str(path), str(target / path.name))


setup(cmdclass={"build_py": BuildWithRecipes})
