"""KL estimators and entropy terms of other papers."""
