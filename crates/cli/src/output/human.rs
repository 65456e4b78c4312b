//! Sizes for people.

/// A size with three or four significant places and a binary unit: `0 B`, `1.50 KiB`,
/// `931 GiB`. Exact sizes are for `--json` and for `stat`.
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

#[cfg(test)]
mod tests {
    use super::human_size;

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
