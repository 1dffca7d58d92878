"""What the site makes from the repository while it is built: code, differences, tables, figures.

Nothing here imports torch or the engine: sources are read as text, results as JSON.
"""

from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
