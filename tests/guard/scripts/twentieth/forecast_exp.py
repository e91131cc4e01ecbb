"""Long-term forecasting after the LTSF repositories: borders, scaler, DLinear with instance normalisation, early stopping."""

import copy

import numpy as np
import torch
import torch.nn as nn
from sklearn.preprocessing import StandardScaler
from torch import optim
from torch.utils.data import DataLoader, Dataset


class Config:
    seed = 0
    seq_len = 72
    label_len = 24
    pred_len = 24
    enc_in = 4
    moving_avg = 25
    individual = False
    train_epochs = 8
    batch_size = 32
    patience = 3
    learning_rate = 0.003
    lradj = "type1"
    inverse = False


def read_data(hours=24 * 220):
    """Four hourly load curves: day, week, a slow drift, and noise that lasts some hours."""
    rng = np.random.default_rng(3)
    t = np.arange(hours)
    columns = []
    for k in range(4):
        day = np.sin(2 * np.pi * (t - 3 * k) / 24) + 0.4 * np.sin(4 * np.pi * (t + k) / 24)
        week = 0.5 * ((t // 24 + k) % 7 >= 5)
        drift = np.cumsum(rng.normal(0, 0.02, hours))
        noise = np.zeros(hours)
        for i in range(1, hours):
            noise[i] = 0.8 * noise[i - 1] + rng.normal(0, 0.15)
        columns.append((10 + 5 * k) + (1 + k) * (day - week + drift + noise))
    return np.stack(columns, axis=1).astype(np.float32)


class Dataset_Hour(Dataset):
    def __init__(self, flag, size, scale=True):
        self.seq_len, self.label_len, self.pred_len = size
        self.set_type = {"train": 0, "val": 1, "test": 2}[flag]
        self.scale = scale
        self.__read_data__()

    def __read_data__(self):
        self.scaler = StandardScaler()
        df = read_data()
        border1s = [0, 140 * 24 - self.seq_len, 170 * 24 - self.seq_len]
        border2s = [140 * 24, 170 * 24, 220 * 24]
        border1 = border1s[self.set_type]
        border2 = border2s[self.set_type]
        if self.scale:
            train_data = df[border1s[0] : border2s[0]]
            self.scaler.fit(train_data)
            data = self.scaler.transform(df)
        else:
            data = df
        self.data_x = data[border1:border2]
        self.data_y = data[border1:border2]

    def __getitem__(self, index):
        s_begin = index
        s_end = s_begin + self.seq_len
        r_begin = s_end - self.label_len
        r_end = r_begin + self.label_len + self.pred_len
        return self.data_x[s_begin:s_end], self.data_y[r_begin:r_end]

    def __len__(self):
        return len(self.data_x) - self.seq_len - self.pred_len + 1

    def inverse_transform(self, data):
        return self.scaler.inverse_transform(data)


def data_provider(args, flag):
    shuffle_flag = flag != "test"
    data_set = Dataset_Hour(flag=flag, size=[args.seq_len, args.label_len, args.pred_len])
    data_loader = DataLoader(data_set, batch_size=args.batch_size, shuffle=shuffle_flag, drop_last=flag != "test")
    return data_set, data_loader


class moving_avg(nn.Module):
    """Moving average block to highlight the trend of time series."""

    def __init__(self, kernel_size):
        super().__init__()
        self.kernel_size = kernel_size
        self.avg = nn.AvgPool1d(kernel_size=kernel_size, stride=1, padding=0)

    def forward(self, x):
        # padding on the both ends of time series
        front = x[:, 0:1, :].repeat(1, (self.kernel_size - 1) // 2, 1)
        end = x[:, -1:, :].repeat(1, (self.kernel_size - 1) // 2, 1)
        x = torch.cat([front, x, end], dim=1)
        return self.avg(x.permute(0, 2, 1)).permute(0, 2, 1)


class DLinear(nn.Module):
    def __init__(self, configs):
        super().__init__()
        self.seq_len, self.pred_len, self.channels = configs.seq_len, configs.pred_len, configs.enc_in
        self.moving_avg = moving_avg(configs.moving_avg)
        self.individual = configs.individual
        if self.individual:
            self.Linear_Seasonal = nn.ModuleList([nn.Linear(self.seq_len, self.pred_len) for _ in range(self.channels)])
            self.Linear_Trend = nn.ModuleList([nn.Linear(self.seq_len, self.pred_len) for _ in range(self.channels)])
        else:
            self.Linear_Seasonal = nn.Linear(self.seq_len, self.pred_len)
            self.Linear_Trend = nn.Linear(self.seq_len, self.pred_len)
        self.affine_weight = nn.Parameter(torch.ones(self.channels))
        self.affine_bias = nn.Parameter(torch.zeros(self.channels))

    def forward(self, x):
        # x: [Batch, Input length, Channel]
        means = x.mean(dim=1, keepdim=True).detach()
        stdev = torch.sqrt(x.var(dim=1, keepdim=True, unbiased=False) + 1e-5).detach()
        x = (x - means) / stdev * self.affine_weight + self.affine_bias

        trend_init = self.moving_avg(x)
        seasonal_init = x - trend_init
        seasonal_init, trend_init = seasonal_init.permute(0, 2, 1), trend_init.permute(0, 2, 1)
        if self.individual:
            seasonal_output = torch.stack([f(seasonal_init[:, i]) for i, f in enumerate(self.Linear_Seasonal)], dim=1)
            trend_output = torch.stack([f(trend_init[:, i]) for i, f in enumerate(self.Linear_Trend)], dim=1)
        else:
            seasonal_output = self.Linear_Seasonal(seasonal_init)
            trend_output = self.Linear_Trend(trend_init)
        x = (seasonal_output + trend_output).permute(0, 2, 1)

        x = (x - self.affine_bias) / (self.affine_weight + 1e-5) * stdev + means
        return x  # to [Batch, Output length, Channel]


class EarlyStopping:
    def __init__(self, patience=7):
        self.patience, self.counter, self.best_score, self.early_stop = patience, 0, None, False

    def __call__(self, val_loss, model):
        score = -val_loss
        if self.best_score is None or score > self.best_score:
            self.best_score, self.counter = score, 0
            self.checkpoint = copy.deepcopy(model.state_dict())
        else:
            self.counter += 1
            if self.counter >= self.patience:
                self.early_stop = True


def adjust_learning_rate(optimizer, epoch, args):
    if args.lradj == "type1":
        lr_adjust = {epoch: args.learning_rate * (0.7 ** ((epoch - 1) // 1))}
    else:
        lr_adjust = {2: 5e-4, 4: 1e-4}
    if epoch in lr_adjust:
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr_adjust[epoch]


class Exp_Main:
    def __init__(self, args):
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = DLinear(args).float().to(self.device)

    def vali(self, vali_loader, criterion):
        total_loss = []
        self.model.eval()
        with torch.no_grad():
            for batch_x, batch_y in vali_loader:
                outputs = self.model(batch_x.float().to(self.device))
                batch_y = batch_y[:, -self.args.pred_len :, :].to(self.device)
                total_loss.append(criterion(outputs, batch_y).item())
        self.model.train()
        return np.average(total_loss)

    def train(self):
        _, train_loader = data_provider(self.args, "train")
        _, vali_loader = data_provider(self.args, "val")
        early_stopping = EarlyStopping(patience=self.args.patience)
        model_optim = optim.Adam(self.model.parameters(), lr=self.args.learning_rate)
        criterion = nn.MSELoss()
        for epoch in range(self.args.train_epochs):
            train_loss = []
            self.model.train()
            for batch_x, batch_y in train_loader:
                model_optim.zero_grad()
                batch_x, batch_y = batch_x.float().to(self.device), batch_y.float().to(self.device)
                outputs = self.model(batch_x)
                batch_y = batch_y[:, -self.args.pred_len :, :]
                loss = criterion(outputs, batch_y)
                train_loss.append(loss.item())
                loss.backward()
                model_optim.step()
            vali_loss = self.vali(vali_loader, criterion)
            print(f"Epoch: {epoch + 1} | Train Loss: {np.average(train_loss):.5f} Vali Loss: {vali_loss:.5f}")
            early_stopping(vali_loss, self.model)
            if early_stopping.early_stop:
                print("Early stopping")
                break
            adjust_learning_rate(model_optim, epoch + 1, self.args)
        self.model.load_state_dict(early_stopping.checkpoint)

    def test(self):
        test_data, test_loader = data_provider(self.args, "test")
        preds, trues = [], []
        self.model.eval()
        with torch.no_grad():
            for batch_x, batch_y in test_loader:
                outputs = self.model(batch_x.float().to(self.device)).cpu().numpy()
                batch_y = batch_y[:, -self.args.pred_len :, :].numpy()
                if self.args.inverse:
                    shape = outputs.shape
                    outputs = test_data.inverse_transform(outputs.reshape(-1, shape[-1])).reshape(shape)
                    batch_y = test_data.inverse_transform(batch_y.reshape(-1, shape[-1])).reshape(shape)
                preds.append(outputs)
                trues.append(batch_y)
        preds, trues = np.concatenate(preds), np.concatenate(trues)
        mae, mse = np.mean(np.abs(preds - trues)), np.mean((preds - trues) ** 2)
        print(f"test shape: {preds.shape}, mse:{mse:.4f}, mae:{mae:.4f}")
        return mse


if __name__ == "__main__":
    args = Config()
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    exp = Exp_Main(args)
    exp.train()
    print(f"FINAL mse={exp.test():.4f}")
