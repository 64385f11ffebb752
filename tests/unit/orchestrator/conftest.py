import pytest

from support.planes import conduct  # noqa: F401


@pytest.fixture
def reward(tmp_path):
    def write(body: str, name: str = "reward") -> str:
        file = tmp_path / "user_reward.py"
        file.write_text(body)
        return f"{file}:{name}"

    return write
