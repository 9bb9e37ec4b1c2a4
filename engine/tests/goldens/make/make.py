"""Remakes the goldens in the folder that is given: `make golden` calls it."""

import pathlib
import sys

import families
import gguf_files
import layouts
import models

if __name__ == "__main__":
    directory = pathlib.Path(sys.argv[1])
    families.write(directory)
    layouts.write(directory)
    models.write(directory)
    gguf_files.write(directory)
