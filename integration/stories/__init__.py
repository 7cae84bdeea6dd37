"""The expectations of users, as ten stories: each criterion with its proofs and their results."""
