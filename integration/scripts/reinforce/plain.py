import torch
from parts import MOST, Policy, Walk, returns_of


def main():
    torch.manual_seed(3)
    env, policy = Walk(), Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    running_reward = 10.0
    for episode in range(1, 31):
        state, log_probs, rewards = env.reset(), [], []
        for _ in range(MOST):
            log_prob = policy(state)
            action = torch.multinomial(log_prob.detach().exp(), 1).item()
            log_probs.append(log_prob[action])
            state, reward, done = env.step(action)
            rewards.append(reward)
            if done:
                break
        running_reward = 0.05 * sum(rewards) + 0.95 * running_reward
        optimizer.zero_grad()
        policy_loss = -(torch.stack(log_probs) * returns_of(rewards)).sum()
        policy_loss.backward()
        optimizer.step()
        if episode % 10 == 0:
            print(f"episode {episode}: loss {policy_loss:.4f}, reward {running_reward:.2f}")


main()
