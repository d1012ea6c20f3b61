"""What the exercises expect, one module per chapter; `solutions/` holds one way to do each.

Read a chapter's module only after its exercises.
"""
