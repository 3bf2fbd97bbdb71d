"""A replay rule for rare rewards and much search: only half of a replayed group goes by reward.

    python tba.py --plugin bench/mixed.py --replay_rule mixed --reward_inverse_temperature 10 ...

If the buffer holds many successes of a prompt, replay by reward draws nothing else, and a group in
which all rewards are equal teaches nothing (docs/results.md, "Sparse rewards").
"""

import tba


class Mixed(tba.Newest):
    """Half of a replayed group is drawn by reward and half uniformly, so that rewards differ."""

    def replay(self, count: int, K: int, used: set[int]) -> list[list[tba.Trajectory]]:
        groups = super().replay(count, K // 2, used)
        for group in groups:
            stored = list(self.buffer.trajectories[group[0].prompt_id].values())
            chosen = self.buffer.rng.choice(len(stored), K - len(group))
            group += [stored[i] for i in chosen]
        return groups


tba.REPLAY_RULES["mixed"] = Mixed
