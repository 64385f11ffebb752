from engine.reward.verifiers import per_response

__all__ = ["per_response"]
