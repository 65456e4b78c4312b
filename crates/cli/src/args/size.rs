//! Sizes on the command line.

/// A number of bytes as people write it: `4096`, `1.5G`, `512KiB`. `200MB` is in powers of 1000,
/// as the core utilities have it.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    const UNITS: &str = "KMGTPE";
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let suffix = text[digits.len()..].to_ascii_uppercase();
    let unit = suffix.chars().next();
    let power = unit.and_then(|unit| (1..).zip(UNITS.chars()).find(|one| one.1 == unit));
    let power: Option<u32> = power.map(|(power, _)| power);
    let scale: u128 = match (power, suffix.get(1..).unwrap_or_default()) {
        (Some(power), "" | "IB") => 1 << (10 * power),
        (Some(power), "B") => 1000_u128.pow(power),
        _ if suffix.is_empty() || suffix == "B" => 1,
        _ => {
            return Err(format!(
                "no unit is called {suffix}; there are K, M, G, T, P and E, and KB, MB for powers of 1000"
            ));
        }
    };
    let (whole, part) = digits.split_once('.').unwrap_or((digits, ""));
    let are_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    // No size needs more than 18 digits behind the point, and so many keep the sum below in range.
    let is_number = !whole.is_empty() && are_digits(whole) && are_digits(part) && part.len() <= 18;
    if !is_number || digits.ends_with('.') {
        return Err("a number is expected, as in 4096, 512K or 1.5G".to_owned());
    }
    let too_large = || "more than 16 EiB".to_owned();
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let tens: u128 = part.bytes().map(|_| 10).product();
    let part: u128 = if part.is_empty() { 0 } else { part.parse().unwrap_or(0) };
    if part != 0 && scale == 1 {
        return Err("a whole number of bytes is expected".to_owned());
    }
    // The products stay below 2^64 * 2^60 and 10^18 * 2^60, so they fit a `u128`.
    u64::try_from(u128::from(whole) * scale + part * scale / tens).map_err(|_| too_large())
}

/// The size that a device is to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NewSize {
    /// The number of the device.
    pub(crate) device: u64,
    /// Its size.
    pub(crate) size: SizeChange,
}

/// A new size, or a change of a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SizeChange {
    /// So many bytes.
    To(u64),
    /// So many bytes more.
    More(u64),
    /// So many bytes less.
    Less(u64),
    /// All that the device has.
    Max,
    /// The smallest size, and so many bytes more.
    Minimal(u64),
}

impl NewSize {
    /// The size that the command line names.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let (device, size) = match text.split_once(':') {
            Some((device, size)) => {
                let device = device.parse().map_err(|_| {
                    format!("the number of a device is expected before the colon, not {device}")
                })?;
                (device, size)
            }
            None => (1, text),
        };
        let size = if size == "max" {
            SizeChange::Max
        } else if let Some(slack) = parse_minimal(size) {
            SizeChange::Minimal(slack?)
        } else if let Some(more) = size.strip_prefix('+') {
            SizeChange::More(parse_size(more)?)
        } else if let Some(less) = size.strip_prefix('-') {
            SizeChange::Less(parse_size(less)?)
        } else {
            SizeChange::To(parse_size(size)?)
        };
        Ok(Self { device, size })
    }
}

/// The bytes behind `minimal+`, 0 for `minimal` alone; `None` for another text.
pub(crate) fn parse_minimal(text: &str) -> Option<Result<u64, String>> {
    let slack = text.strip_prefix("minimal")?;
    Some(match slack.strip_prefix('+') {
        Some(slack) => parse_size(slack),
        None if slack.is_empty() => Ok(0),
        None => Err(format!("minimal or minimal+SIZE is expected, not {text}")),
    })
}

#[cfg(test)]
mod tests {
    use super::{NewSize, SizeChange, parse_size};

    #[test]
    fn new_sizes() {
        for (text, device, size) in [
            ("20G", 1, SizeChange::To(20 << 30)),
            ("2:20G", 2, SizeChange::To(20 << 30)),
            ("+4K", 1, SizeChange::More(4096)),
            ("3:-4K", 3, SizeChange::Less(4096)),
            ("max", 1, SizeChange::Max),
            ("minimal", 1, SizeChange::Minimal(0)),
            ("1:minimal+64M", 1, SizeChange::Minimal(64 << 20)),
        ] {
            assert_eq!(NewSize::parse(text), Ok(NewSize { device, size }), "{text}");
        }
        for text in ["", "x:4K", ":4K", "+", "-", "minimal-4K", "minimal+", "maximal", "--4K"] {
            NewSize::parse(text).expect_err(text);
        }
    }

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4k", 4096),
            ("16K", 16384),
            ("3MiB", 3 << 20),
            ("4G", 4 << 30),
            ("16t", 16 << 40),
            ("15P", 15 << 50),
            ("15E", 15 << 60),
            ("1.5G", 3 << 29),
            ("0.3K", 307),
            ("200MB", 200_000_000),
            ("2kB", 2000),
            ("7B", 7),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in [
            "",
            "G",
            "1.5",
            ".5G",
            "1.G",
            "1.2.3K",
            "-1",
            "4X",
            "4KX",
            "4iB",
            "4 G",
            "16E",
            "99999999999999999999",
        ] {
            parse_size(text).expect_err(text);
        }
    }
}
