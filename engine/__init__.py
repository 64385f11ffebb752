"""The reinforcement-learning system of Metronome; knows nothing of Prefect or MLflow and is usable without them."""
