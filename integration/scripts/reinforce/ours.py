import torch
from parts import MOST, Policy, Walk, returns_of
from torch.nn.functional import pad

from sbp_launch import parallelize


def loss(policy, batch):
    states, actions, returns = batch
    log_probs = policy(states).gather(1, actions[:, None]).squeeze(1)
    return -(log_probs * returns).sum()


def main():
    torch.manual_seed(3)
    env, policy = Walk(), Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    running_reward = 10.0
    example = (torch.zeros(MOST, 2), torch.zeros(MOST, dtype=torch.long), torch.zeros(MOST))
    with parallelize(policy, loss, example, optimizer, planner="manual/data_parallel") as step:
        for episode in range(1, 31):
            state, states, actions, rewards = env.reset(), [], [], []
            for _ in range(MOST):
                states.append(state)
                with torch.no_grad():
                    log_prob = policy(state)
                action = torch.multinomial(log_prob.exp(), 1).item()
                actions.append(action)
                state, reward, done = env.step(action)
                rewards.append(reward)
                if done:
                    break
            running_reward = 0.05 * sum(rewards) + 0.95 * running_reward
            played = (torch.stack(states), torch.tensor(actions), returns_of(rewards))
            more = MOST - len(rewards)
            policy_loss = step([pad(one, (0, 0, 0, more)[-2 * one.dim() :]) for one in played])
            if episode % 10 == 0 and step.world.rank == 0:
                print(f"episode {episode}: loss {policy_loss:.4f}, reward {running_reward:.2f}")


main()
