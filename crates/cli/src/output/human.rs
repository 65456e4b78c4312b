//! Sizes in a form for users.

/// A size with three or four significant places and a binary unit: `0 B`, `1.50 KiB`, `931 GiB`.
/// Exact sizes are for `--json` and for `stat`.
pub(crate) fn human_size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let unit = (bytes.ilog2() / 10).min(6);
    // Hundredths of the unit, rounded to the nearest; 128 bits because 16 EiB times a
    // hundred does not fit 64.
    let scale = 1u128 << (10 * unit);
    let hundredths = (u128::from(bytes) * 100 + scale / 2) / scale;
    let name = UNITS[unit as usize - 1];
    match hundredths {
        0..1_000 => format!("{}.{:02} {name}", hundredths / 100, hundredths % 100),
        1_000..10_000 => format!("{}.{} {name}", hundredths / 100, hundredths % 100 / 10),
        _ => format!("{} {name}", hundredths / 100),
    }
}

/// A size in the form of `ls -h`, `du -h` and `df -h`, rounded up: `0`, `1.5K`, `12M`, `1.0T`.
pub(crate) fn short_size(bytes: u64) -> String {
    const UNITS: [char; 6] = ['K', 'M', 'G', 'T', 'P', 'E'];
    if bytes < 1024 {
        return bytes.to_string();
    }
    let bytes = u128::from(bytes);
    for (power, unit) in (1..).zip(UNITS) {
        let scale = 1u128 << (10 * power);
        let tenths = (bytes * 10).div_ceil(scale);
        if tenths < 100 {
            return format!("{}.{}{unit}", tenths / 10, tenths % 10);
        }
        let whole = bytes.div_ceil(scale);
        if whole < 1024 {
            return format!("{whole}{unit}");
        }
    }
    unreachable!("16 EiB, which is the last unit, is less than 1024 of it")
}

#[cfg(test)]
mod tests {
    use super::{human_size, short_size};

    #[test]
    fn short_sizes() {
        for (bytes, text) in [
            (0, "0"),
            (1023, "1023"),
            (1024, "1.0K"),
            (1025, "1.1K"),
            (10_138, "10K"),
            (1_047_552, "1023K"),
            (1_047_553, "1.0M"),
            (u64::MAX, "16E"),
        ] {
            assert_eq!(short_size(bytes), text, "{bytes}");
        }
    }

    #[test]
    fn sizes() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (1536, "1.50 KiB"),
            (4 << 30, "4.00 GiB"),
            (10 << 20, "10.0 MiB"),
            (931 << 30, "931 GiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(human_size(bytes), text);
        }
    }
}
