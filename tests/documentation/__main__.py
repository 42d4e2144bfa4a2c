import sys
from pathlib import Path

from .site import build

target = Path(sys.argv[1] if len(sys.argv) > 1 else "build/site").absolute()
pages = build(target)
print(f"{len(pages)} pages; open {(target / 'index.html').as_uri()}")
