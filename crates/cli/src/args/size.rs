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

#[cfg(test)]
mod tests {
    use super::parse_size;

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
