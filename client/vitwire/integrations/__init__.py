"""Vitwire as the vision tower of other libraries; each module needs the library it is named after."""
