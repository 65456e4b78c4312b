//! Sums that must not fall below zero, and what ends writing when one would.
//!
//! Many threads add to the sums of reserved, free and used space, and subtract from them. A sum
//! that falls below zero wraps to more than the volume has, and from then on everything fits. So a
//! [`NonNegativeCounter`] keeps its value when a thread subtracts more than that, and ends all
//! writing: after one wrong sum, the engine does not know what is free.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::{Arc, OnceLock};

use offshoot_vfs::{Code, Corrupt, Error};

/// A number that an engine counts, for display.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counter {
    /// Its name.
    pub name: &'static str,
    /// What it counts, in a sentence.
    pub about: &'static str,
    /// Its value.
    pub value: u64,
}

/// A struct of numbers, whose fields are public in the crate, and one of the atomic counters behind
/// them. `list` of the first gives each as a [`Counter`] whose name begins with the prefix.
#[macro_export]
macro_rules! statistics {
    (
        $(#[doc = $what:literal])+
        $values:ident, $counters:ident, $prefix:literal:
        $($(#[doc = $about:literal])+ $name:ident,)+
    ) => {
        $(#[doc = $what])+
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub(crate) struct $values {
            $($(#[doc = $about])+ pub(crate) $name: u64,)+
        }

        impl $values {
            /// All of them, in the order of their declaration.
            pub(crate) fn list(&self) -> Vec<$crate::counter::Counter> {
                vec![$($crate::counter::Counter {
                    name: concat!($prefix, stringify!($name)),
                    about: concat!($($about),+).trim_ascii(),
                    value: self.$name,
                },)+]
            }
        }

        #[doc = concat!("The counters behind [`", stringify!($values), "`].")]
        #[derive(Debug, Default)]
        pub(crate) struct $counters {
            $(pub(crate) $name: std::sync::atomic::AtomicU64,)+
        }

        impl $counters {
            /// What they have counted up to now.
            pub(crate) fn get(&self) -> $values {
                $values { $($name: self.$name.load(std::sync::atomic::Ordering::Relaxed),)+ }
            }
        }
    };
}

/// Adds to a counter that only statistics read: it orders no other access to memory.
pub fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Relaxed);
}

/// What a [`WriteStop`] calls once, with the cause, when writing ends.
pub type OnStop = Box<dyn Fn(&str) + Send + Sync>;

/// Whether a volume is still written. All parts of an engine that can find a reason to stop writing
/// share one.
#[derive(Default)]
pub struct WriteStop {
    cause: OnceLock<String>,
    on_stop: Option<OnStop>,
}

impl WriteStop {
    /// A volume that is written.
    #[must_use]
    pub fn new(on_stop: Option<OnStop>) -> Arc<Self> {
        Arc::new(Self { cause: OnceLock::new(), on_stop })
    }

    /// Why nothing is written any more; `None` while the volume is written.
    pub fn cause(&self) -> Option<&str> {
        self.cause.get().map(String::as_str)
    }

    /// Ends all writing, and calls [`OnStop`] with the first cause.
    pub fn set(&self, problem: &str) {
        self.set_and(problem, || ());
    }

    /// The same, with `between` called when writing has ended and before [`OnStop`] is called,
    /// which may panic.
    pub fn set_and(&self, problem: &str, between: impl FnOnce()) {
        let is_first = self.cause.set(problem.to_owned()).is_ok();
        between();
        if let Some(on_stop) = self.on_stop.as_ref().filter(|_| is_first) {
            on_stop(problem);
        }
    }

    /// Ends all writing, and does not call [`OnStop`]: the caller reports the cause itself.
    pub fn set_quietly(&self, problem: &str) {
        self.cause.get_or_init(|| problem.to_owned());
    }
}

impl fmt::Debug for WriteStop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Stop").field(&self.cause()).finish()
    }
}

/// A sum of bytes, or a number of things, that must not fall below zero.
#[derive(Debug)]
pub struct NonNegativeCounter {
    /// What it counts, for errors.
    name: &'static str,
    value: AtomicU64,
    stop: Arc<WriteStop>,
}

impl NonNegativeCounter {
    /// A counter of nothing yet.
    pub fn new(name: &'static str, stop: &Arc<WriteStop>) -> Self {
        Self::starting_at(0, name, stop)
    }

    /// A counter of `value` already.
    pub fn starting_at(value: u64, name: &'static str, stop: &Arc<WriteStop>) -> Self {
        Self { name, value: AtomicU64::new(value), stop: stop.clone() }
    }

    /// What it is now.
    pub fn get(&self) -> u64 {
        self.value.load(SeqCst)
    }

    /// There are `by` more.
    pub fn add(&self, by: u64) {
        self.value.fetch_add(by, SeqCst);
    }

    /// There are `by` less. When that is more than the value, the value stays, and all writing
    /// ends.
    pub fn sub(&self, by: u64) {
        let less = self.value.fetch_update(SeqCst, SeqCst, |value| value.checked_sub(by));
        if let Err(value) = less {
            self.stop.set(&below_zero(self.name, value, by).to_string());
        }
    }
}

/// The error that a counter would fall below zero.
#[must_use]
pub fn below_zero(name: &str, value: u64, by: u64) -> Error {
    let problem = format!(
        "{by} should be taken from it, and it is {value}: the accounts of the volume in memory are wrong, which no volume \
         should cause; open the volume again, and report this"
    );
    let structure = format!("counter \"{name}\"");
    Corrupt { structure, code: Code::Corrupt, logical: None, problem, file: None }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_that_would_fall_below_zero_stays_and_ends_writing() {
        let told = Arc::new(parking_lot::Mutex::new(Vec::new()));
        let telling = told.clone();
        let stop =
            WriteStop::new(Some(Box::new(move |cause| telling.lock().push(cause.to_owned()))));
        let counter = NonNegativeCounter::starting_at(5, "apples", &stop);
        counter.add(2);
        counter.sub(7);
        assert_eq!((counter.get(), stop.cause()), (0, None));
        counter.add(3);
        counter.sub(4);
        assert_eq!(counter.get(), 3);
        let cause = stop.cause().expect("it ends writing").to_owned();
        assert!(cause.contains("apples") && cause.contains("4 should"), "{cause}");
        counter.sub(9);
        assert_eq!(stop.cause(), Some(&cause[..]), "the first cause stays");
        assert_eq!(told.lock().len(), 1, "{:?}", told.lock());
    }
}
