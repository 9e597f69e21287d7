"""The laboratory: what a model predicts, what an engine counted and what it bought, reconciled on one trace."""
