"""Advantages, surrogates, weights and stop rules of other papers, and learning from a teacher."""
