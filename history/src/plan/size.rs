//! How large versions will be that have not been put yet.

/// Sizes so far: their mean, and whether they grow.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sizes {
    count: f64,
    sum: f64,
    /// Sums of numbers, of their squares, and of numbers times sizes.
    numbers: f64,
    squares: f64,
    products: f64,
    /// Moving average.
    recent: f64,
}

/// Growth is not believed to go on beyond so many times what is seen now.
const GROWTH: f64 = 2.0;

impl Sizes {
    pub(super) fn add(&mut self, size: f64) {
        let number = self.count;
        self.count += 1.0;
        self.sum += size;
        self.numbers += number;
        self.squares += number * number;
        self.products += number * size;
        let weight = f64::max(0.1, 1.0 / self.count);
        self.recent += weight * (size - self.recent);
    }

    /// The mean of the next `n`. Too much is better than too little: what is flushed in vain costs idle time of a link,
    /// what is flushed too late is waited for.
    pub(super) fn expected(&self, n: u64) -> f64 {
        if self.count < 2.0 {
            return self.recent;
        }
        let mean = self.sum / self.count;
        let spread = self.squares - self.numbers * self.numbers / self.count;
        let slope = (self.products - self.numbers * mean) / spread;
        let middle = self.count + n as f64 / 2.0;
        let trend = mean + slope * (middle - self.numbers / self.count);
        f64::max(self.recent, mean).max(trend.min(GROWTH * self.recent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_expected_to_go_on_for_a_while() {
        let mut sizes = Sizes::default();
        assert_eq!(sizes.expected(10), 0.0);
        (0..10).for_each(|_| sizes.add(50.0));
        assert_eq!(sizes.expected(100), 50.0);
        let mut growing = Sizes::default();
        (1..=10).for_each(|i| growing.add(10.0 * f64::from(i)));
        let now = growing.expected(10);
        assert!((100.0..180.0).contains(&now), "{now}");
        assert!(growing.expected(1000) <= 2.0 * 100.0);
    }
}
