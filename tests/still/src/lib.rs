//! How long the machine stood still, or had no processor for a test: nobody else is to blame for that time.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Time between two looks at the clock.
const LOOK: Duration = Duration::from_millis(20);

/// Looks that are not later than this are as late as they are on any machine with much to do.
const LATE: Duration = Duration::from_millis(200);

/// The look before, and how late those were together that were late.
type Looks = Mutex<(Instant, Duration)>;

/// Looks at the clock until it is dropped.
#[derive(Debug)]
pub struct Watch {
    begin: Instant,
    looks: Arc<Looks>,
}

impl Watch {
    /// Looks from now on.
    pub fn begin() -> Self {
        let looks = Arc::new(Mutex::new((Instant::now(), Duration::ZERO)));
        let watched = Arc::downgrade(&looks);
        std::thread::spawn(move || look(&watched));
        Self {
            begin: Instant::now(),
            looks,
        }
    }

    /// How long the machine has stood still since, as this test sees it.
    pub fn stood(&self) -> Duration {
        let (last, late) = *self.looks.lock().unwrap_or_else(PoisonError::into_inner);
        late + lateness(last)
    }

    /// The time since, without that in which the machine stood still.
    pub fn elapsed(&self) -> Duration {
        self.begin.elapsed().saturating_sub(self.stood())
    }
}

/// How late a look is now, after the one at `last`.
fn lateness(last: Instant) -> Duration {
    let late = last.elapsed().saturating_sub(LOOK);
    if late > LATE {
        late
    } else {
        Duration::ZERO
    }
}

fn look(watched: &Weak<Looks>) {
    while let Some(looks) = watched.upgrade() {
        {
            let mut looks = looks.lock().unwrap_or_else(PoisonError::into_inner);
            let (last, late) = *looks;
            *looks = (Instant::now(), late + lateness(last));
        }
        drop(looks);
        std::thread::sleep(LOOK);
    }
}
