"""Advantage estimators of other papers."""
