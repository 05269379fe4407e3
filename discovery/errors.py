"""The root of the error tree. It lives in the lowest room because every room above raises errors of its own.

The whole tree is drawn in `node/errors.py`.
"""


class RoostError(Exception):
    """Something a person can act on.

    `message` says what happened and to what, `cure` what to do about it. `str(error)` is both. These are shown to
    users without a traceback; anything else that escapes is a bug.
    """

    def __init__(self, message: str, cure: str = "") -> None:
        self.message = message.rstrip()
        self.cure = cure.rstrip()
        super().__init__(f"{self.message} {self.cure}".rstrip())
