"""The verifier of mathematical answers: finds one claim in a completion and says whether it is the gold answer."""
