"""Write configs/schema.json, the JSON schema that editors check a config with: python tools/write_schema.py"""

import json
from pathlib import Path

from curriculum.config import json_schema

path = Path(__file__).parents[1] / "configs" / "schema.json"
path.write_text(json.dumps(json_schema(), indent=2) + "\n")
print(path.name)
