"""The conversations of `recipes/tiny/calculator.yaml`: a digit-sum problem with a calculator for its last step."""

CALL = "#"  # where the tiny model has learned to write its answer
MOST_CALLS = 2


async def calculator(client, problem):
    """Hold one conversation. Every `#` of the policy calls the calculator, which answers `=4#`; then it goes on."""
    conversation, call = client.conversation(), client.encode(CALL)
    for _ in range(MOST_CALLS):
        turn = await conversation.generate(stop_token_ids=call)
        called = turn.finish_reason == "stop" and turn.tokens[-1:] == call
        if not called or not conversation.tell(client.encode(result(client.decode(turn.tokens)))):
            return conversation
    await conversation.generate()
    return conversation


def result(text: str) -> str:
    """Return the sum modulo 5 of the digits in ``text``, which are every other character up to the call."""
    digits = text.removesuffix(CALL)[::2]
    return f"={sum(map(int, digits)) % 5}{CALL}" if digits.isdecimal() else f"=?{CALL}"
