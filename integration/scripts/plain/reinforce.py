"""Policy gradients, as PyTorch's example `reinforce`: one update for each episode."""

from collections import deque

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.distributions import Categorical

torch.manual_seed(543)
EPISODES, LONGEST, GAMMA = 12, 24, 0.99


class Corridor:
    """A pole that is to be kept upright: it ends where the angle is too large."""

    def reset(self):
        self.angle, self.speed = torch.rand(2).mul(0.4).sub(0.2).tolist()
        return torch.tensor([self.angle, self.speed])

    def step(self, action):
        self.speed += 0.1 * self.angle + (0.12 if action else -0.12)
        self.angle += self.speed
        return torch.tensor([self.angle, self.speed]), 1.0, abs(self.angle) > 1.0


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(2, 32)
        self.affine2 = nn.Linear(32, 2)

    def forward(self, x):
        return F.softmax(self.affine2(F.relu(self.affine1(x))), dim=-1)


env, policy = Corridor(), Policy()
optimizer = optim.Adam(policy.parameters(), lr=1e-2)
saved_log_probs, rewards = [], []


def select_action(state):
    probs = policy(state.unsqueeze(0))
    m = Categorical(probs)
    action = m.sample()
    saved_log_probs.append(m.log_prob(action))
    return action.item()


def discounted():
    returns = deque()
    for r in rewards[::-1]:
        returns.appendleft(r + GAMMA * (returns[0] if returns else 0.0))
    returns = torch.tensor(returns)
    return (returns - returns.mean()) / (returns.std() + 1e-6)


def finish_episode():
    policy_loss = [-log_prob * R for log_prob, R in zip(saved_log_probs, discounted())]
    optimizer.zero_grad()
    policy_loss = torch.cat(policy_loss).sum()
    policy_loss.backward()
    optimizer.step()
    del rewards[:], saved_log_probs[:]
    return policy_loss.item()


running_reward = 10
for i_episode in range(1, EPISODES + 1):
    state, ep_reward = env.reset(), 0
    for t in range(LONGEST):
        action = select_action(state)
        state, reward, done = env.step(action)
        rewards.append(reward)
        ep_reward += reward
        if done and t > 1:
            break
    running_reward = 0.05 * ep_reward + 0.95 * running_reward
    policy_loss = finish_episode()
    print(
        f"episode {i_episode}: loss {policy_loss:.4f}, reward {ep_reward:.2f}, {running_reward:.2f}"
    )
