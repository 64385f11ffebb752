"""The reinforcement-learning system of Metronome. It does not depend on Prefect or MLflow and is usable without
them.
"""

import os

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # else torch imports torch_npu, which fails without CANN
